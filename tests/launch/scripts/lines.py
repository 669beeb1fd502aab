import sys

for i in range(int(sys.argv[1])):
    print(f"line {i} {'x' * (i % 80)}")
    if i % 10 == 0:
        print(f"note {i}", file=sys.stderr)
sys.stdout.write("the last line has no newline")
