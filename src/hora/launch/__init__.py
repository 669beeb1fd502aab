"""The launcher behind `hora run`: starts and supervises processes, here and on other hosts. Imports no torch."""
