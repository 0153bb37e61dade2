"""python -m autopar"""

from autopar.cli.commands import main

if __name__ == "__main__":
    main()
