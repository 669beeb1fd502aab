"""`hora run --hosts` over machines that are namespaces of this one. A package: its conftest shares no name."""
