"""ECRM: DLRM training whose embedding tables survive killed ranks bit for bit."""

__all__ = ["__version__"]

__version__ = "0.1.0"
