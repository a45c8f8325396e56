"""Who is who: certificates, signatures, private files, and access lists. Knows nothing of runs or rows.

In: names and files. Out: signed and private files, access lists (`security`). Imports: `_base`, `errors`.
"""
