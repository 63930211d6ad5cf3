"""Saved states with their bundles opened, for tests that look into them."""

from __future__ import annotations

import copy
from typing import Any

from mukron.optim.saving import BUNDLED, opened


def contents(optimizer: Any) -> dict[str, Any]:
    """What an optimizer saves: by parameter, by group, and what is tied to neither as "mukron", all as copies."""
    saved = copy.deepcopy(optimizer.state_dict())
    records = [opened(values["mukron"]) for values in saved["state"].values()]
    (record,) = [record for record in records if record]
    groups = [
        {name: opened(value) if name in BUNDLED else value for name, value in group.items()}
        for group in saved["param_groups"]
    ]
    state = {index: opened(values["kept"]) for index, values in saved["state"].items()}
    return {"state": state, "param_groups": groups, "mukron": {**record, "steps": optimizer.steps}}
