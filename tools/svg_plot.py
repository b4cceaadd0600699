"""What the programs that draw into documentation share: matplotlib, which is optional, and pictures whose bytes do not
change from run to run."""
import sys


def pyplot():
    """matplotlib.pyplot without a display; None where it is not installed, which is said."""
    try:
        import matplotlib
    except ImportError:
        print("no matplotlib: no plot", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tandem"
    from matplotlib import pyplot as plt
    return plt


def save(plt, figure, path):
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
