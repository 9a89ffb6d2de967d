VENV := .venv
PY := $(VENV)/bin/python
