"""Sessions: training scripts of users, on ranks with tables outliving a rank."""
