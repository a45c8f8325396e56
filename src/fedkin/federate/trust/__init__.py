"""Who is who: certificates, signatures, private files, and access lists. Knows nothing of runs or rows."""
