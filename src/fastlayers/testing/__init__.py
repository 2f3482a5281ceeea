"""What tests and plug-ins import: parity, capture and compile checks; nothing that the library runs by itself."""
