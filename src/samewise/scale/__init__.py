"""Any number of engines behind one address, over Ray."""
__all__: list[str] = []
