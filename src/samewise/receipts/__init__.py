from samewise.receipts.receipt import Receipt, loads, make

__all__ = ["Receipt", "loads", "make"]
