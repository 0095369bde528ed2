"""Sessions: training scripts of users, on ranks whose tables outlive them."""
