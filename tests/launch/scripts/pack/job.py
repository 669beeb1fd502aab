import sys

print(__name__, sys.argv[1:], sys.path[0])
