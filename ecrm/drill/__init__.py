"""`ecrm drill`: the same run undisturbed and with ranks killed.

Both runs are compared in a table, a picture and a page.
"""
