"""Adapts the pages of the repository to the site.

Links to files that are no pages lead to GitHub. Badges are left out: they are
images of other hosts, and the site needs none. In Caddyfiles, the directives of
modules and the placeholders have a color, which Pygments gives to few of them.
"""

import pathlib
import posixpath
import re

from pygments.lexers.configs import CaddyfileLexer
from pygments.token import Comment, Keyword, Name, String, Text, Whitespace

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
GITHUB = "https://github.com/openai-lb/caddy-openai-lb"
BADGE = re.compile(r"^\[!\[[^]]*\]\(https://[^)]*\)\]\([^)]*\)\n", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def on_page_markdown(markdown, page, config, files):
    folder = posixpath.dirname(page.file.src_uri)

    def lead(link):
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        there = REPOSITORY / path
        if files.get_file_from_path(path) or not there.exists():
            return link[0]  # a page, or nothing, which mkdocs reports
        if there.is_dir() and files.get_file_from_path(path + "/README.md"):
            return f"{link[1]}{posixpath.relpath(path, folder or '.')}/README.md{link[3] or ''})"
        return f"{link[1]}{GITHUB}/{'tree' if there.is_dir() else 'blob'}/main/{path}{link[3] or ''})"

    return LINK.sub(lead, BADGE.sub("", markdown))


pygments_tokens = CaddyfileLexer.get_tokens_unprocessed


def caddyfile_tokens(self, text, *args):
    first = True  # word of a line
    for index, token, value in pygments_tokens(self, text, *args):
        if token is Name.Variable:
            token = String.Symbol
        elif token is Text and first and value.strip():
            token = Keyword
        yield index, token, value
        if token in Whitespace or token in Text or token in Comment:
            first = "\n" in value or first and not value.strip()
        else:
            first = False


CaddyfileLexer.get_tokens_unprocessed = caddyfile_tokens
