"""The JSON Schema (draft-07) of a policy file, made from the models, for editors and CI of others.

`policy.schema.json` beside this file is its committed output; `foreshock policy schema` prints it. It knows
shapes and words; what makes no sense together (an unknown receiver, say) the loader alone refuses.
"""

from __future__ import annotations

import json
from typing import Any

from foreshock.policies.models import PolicySet


def json_schema() -> dict[str, Any]:
    """Units appear as strings with patterns, actions as one-key mappings."""
    schema = PolicySet.model_json_schema(by_alias=True, ref_template="#/definitions/{model}")
    definitions = schema.pop("$defs")
    definitions["Action"] |= {"minProperties": 1, "maxProperties": 1}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "definitions": definitions}


def dumps() -> str:
    """The text of `policy.schema.json`."""
    return json.dumps(json_schema(), indent=2, sort_keys=True) + "\n"
