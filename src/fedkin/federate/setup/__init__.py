"""The directory of a federation: how it is planned, made, read and signed again, and who has left it."""
