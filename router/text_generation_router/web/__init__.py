"""The HTTP server: connections, bodies, streams of events. It knows no dialect and no model."""
