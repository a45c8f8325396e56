"""Twenty-nine mine fields: find which of them are alike, without knowing the ground that they lie on.

Radar features of 29 fields; in the literature fields 1 to 15 are foliated, 16 to 29 bare ground or desert. The fit does
not know. FEDKIN_DATA names the folder with landmine/landmine.csv; without it, a generated table of the same shape is
used. With a file name as argument, the script draws the probabilities:

    python examples/mine_fields.py landmine.svg
"""

import os
import sys

from fedkin import KinClassifier
from fedkin.datasets import load_table, look_alike

table = load_table("landmine") if "FEDKIN_DATA" in os.environ else look_alike("landmine")
rows = table.federation
fields = [rows.sites[u] for u in rows.site_index]
model = KinClassifier().fit(rows.X, rows.y, site=fields)

kin = model.kin_
if kin.resolved:
    for number in range(kin.groups.max() + 1):
        members = [str(field) for field, group in zip(kin.sites, kin.groups, strict=True) if group == number]
        print(f"group {number + 1}: {', '.join(members)}")
else:
    print("no groups resolved")
first, last = kin.sites[0], kin.sites[-1]
print(f"{first} and {last} are kin with probability {kin.probability[0, -1]:.2f}")

if len(sys.argv) > 1:
    import matplotlib as mpl

    from fedkin.report import plot_kin

    mpl.rcParams["svg.hashsalt"] = "fedkin"
    ax = plot_kin(model.model_)
    if "FEDKIN_DATA" in os.environ:
        for tick in (*ax.get_xticklabels(), *ax.get_yticklabels()):
            tick.set_color("#2e7d32" if int(tick.get_text()) <= 15 else "#c75b12")
        ax.text(0.0, -0.14, "16 to 29: bare, desert", color="#c75b12", transform=ax.transAxes)
        ax.text(1.0, -0.14, "1 to 15: foliated ground", color="#2e7d32", ha="right", transform=ax.transAxes)
    ax.figure.savefig(sys.argv[1], metadata={"Date": None})
