"""AdapterService and Operations: translate messages for those who manage adapters."""
