"""What launch/netlab.sh starts: the package netlab next to this file."""

import sys

from netlab.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
