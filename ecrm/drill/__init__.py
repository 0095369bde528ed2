"""`ecrm drill`: the same run undisturbed and with ranks killed, compared in a table, a picture and a page."""
