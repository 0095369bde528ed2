"""What a run is before and after its ranks: its plan, where it begins, and its folder."""
