"""Configs that `ecrm launch NAME` accepts by bare name."""
