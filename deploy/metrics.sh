#!/bin/bash
# metrics.sh BUILD - writes the table of metrics, as the server built there has it, into deploy/README.md.
set -euo pipefail
table=$("$1/kld-server" --help-metrics)
TABLE=$table perl -0pi -e \
    's/(<!-- kld-server --help-metrics -->\n).*?(\n<!-- end of it -->)/$1$ENV{TABLE}$2/s' deploy/README.md
