"""The process groups of a run: who is in which, and that nobody else makes any."""

import ast

import pytest
from project import ROOT

GROUPS = ("dp", "tp", "stage", "replica", "files", "ballots")
# pp, dp, tp, saves → the groups that rank 0 has, and its ranks in each; ranks count tp first, then pp, then dp
CASES = {
    "alone": ((1, 1, 1), True, {"files": [0]}),
    "dp3": ((1, 3, 1), False, {}),
    "dp2 saves": ((1, 2, 1), True, {"files": [0, 1], "ballots": [0, 1]}),
    "tp2 dp2": ((1, 2, 2), False, {"dp": [0, 2], "tp": [0, 1], "replica": [0, 1]}),
    "pp2 dp2": ((2, 2, 1), False, {"dp": [0, 2], "stage": [0, 2], "replica": [0, 1]}),
    "pp2 dp2 tp2": (
        (2, 2, 2),
        True,
        {
            "dp": [0, 4],
            "tp": [0, 1],
            "stage": [0, 1, 4, 5],
            "replica": [0, 1, 2, 3],
            "files": list(range(8)),
            "ballots": list(range(8)),
        },
    ),
}


def members(dims, saves):
    """On a rank: group → its ranks; and what the ranks of each sum up to."""
    import torch
    import torch.distributed as dist

    from ds_vit.parallel.groups import build_groups
    from ds_vit.parallel.layout import Layout

    groups = build_groups(Layout(*dims), saves=saves)
    found = {}
    for name in GROUPS:
        group = getattr(groups, name)
        if group is not None:
            total = torch.tensor(2 ** dist.get_rank())
            dist.all_reduce(total, group=group)
            found[name] = [rank for rank in range(dist.get_world_size()) if int(total) >> rank & 1]
            assert found[name] == dist.get_process_group_ranks(group)
    return found


@pytest.mark.parametrize("case", CASES)
def test_who_is_in_which_group(ranks, case):
    """A norm that is summed over the wrong ranks counts parameters twice or not at all."""
    (pp, dp, tp), saves, expected = CASES[case]
    found = ranks.run(pp * dp * tp, members, (pp, dp, tp), saves)
    assert found[0] == expected
    for rank, groups in enumerate(found):
        assert set(groups) == set(expected)
        for name, members_of in groups.items():
            assert rank in members_of
            assert all(found[other][name] == members_of for other in members_of)


def test_one_owner():
    """A group that is made elsewhere is one that this table does not tell of, and may be made by some ranks alone."""
    makers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "ds_vit").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Name, ast.Attribute))
        and (node.id if isinstance(node, ast.Name) else node.attr)
        in (
            *("new_group", "new_subgroups", "new_subgroups_by_enumeration"),
            *("init_device_mesh", "PipelineParallelGrid", "get_slice_parallel_group"),
        )
    }
    assert makers == {"ds_vit/parallel/groups.py"}


def gathered_rows(_):
    """On a rank: the gathered rows, and the gradient of its own; the loss of each rank weighs row i by rank + i."""
    import torch
    import torch.distributed as dist

    from ds_vit.parallel.groups import gather_rows

    rank = dist.get_rank()
    rows = torch.full((2, 3), float(rank), requires_grad=True)
    gathered = gather_rows(rows, None)
    (gathered * (rank + torch.arange(len(gathered)))[:, None]).sum().backward()
    return gathered[:, 0].tolist(), rows.grad[:, 0].tolist()


def test_gathered_rows_have_the_gradient_of_all_ranks(ranks):
    """The gradient of one rank's own loss only, which is what torch's all_gather gives at best."""
    found = ranks.run(3, gathered_rows, None)
    assert [rows for rows, _ in found] == [[0, 0, 1, 1, 2, 2]] * 3
    assert [grads for _, grads in found] == [[3 + 3 * (2 * rank), 3 + 3 * (2 * rank + 1)] for rank in range(3)]
