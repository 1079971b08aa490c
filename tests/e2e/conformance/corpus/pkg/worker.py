"""The probe as a module: `-m pkg.worker`; needs the folder it was started in on sys.path."""

import probe

if __name__ == "__main__":
    probe.main(__name__, __file__)
