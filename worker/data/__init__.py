"""Data: the data sets that this machine's owner registered; they stay here."""
