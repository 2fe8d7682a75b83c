"""Fields that GRPO and RLOO share, in groups by theme; each is declared, typed, limited and described once, here.

A group is a dataclass of fields and nothing else. To add a field, put it in the group it belongs to: it is then a
constructor keyword, a YAML key, a command-line flag and a line of `-h`. Rules that tie fields together are in
`covey.config.rules`.
"""
