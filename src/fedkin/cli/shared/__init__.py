"""What commands share: how they speak (`console`), what they take (`options`) and read, and what they print.

Nothing is imported here, so that each command loads only what it needs. Imports: the rooms below `cli`; no command.
"""
