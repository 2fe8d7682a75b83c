"""An extension of griffe for the documentation site: `Example:` in a docstring opens a section of doctests."""

import re

from griffe import Extension


class DoctestSections(Extension):
    """Griffe knows the section under its plural alone."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
