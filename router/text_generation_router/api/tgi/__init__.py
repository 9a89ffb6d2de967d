"""TGI's routes, and those about the service."""
