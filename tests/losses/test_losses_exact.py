"""Losses whose answers are known."""

import math

import pytest
import torch

from kvcat import InputError
from kvcat.losses import OutputHead, budget_loss, distillation_kl, next_token_loss, score_positions
from naive import normal


def logits_of(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_the_kl_of_two_coins_is_the_textbook_value_from_the_teacher_to_the_student():
    teacher = logits_of(0.5, 0.5).expand(1, 2, 2)
    student = logits_of(0.25, 0.75).expand(1, 2, 2)
    assert distillation_kl(teacher, teacher).item() == 0.0
    assert distillation_kl(teacher, student).item() == pytest.approx(
        0.5 * math.log(4 / 3), abs=1e-15
    )
    assert distillation_kl(student, teacher).item() == pytest.approx(
        0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    )


def test_the_teacher_gets_no_gradient_and_the_student_gets_s_minus_p():
    teacher = normal(1, 2, 4).requires_grad_()
    student = normal(1, 2, 4, seed=1).requires_grad_()
    distillation_kl(teacher, student).backward()
    assert teacher.grad is None
    expected = student.detach().softmax(-1)[:, 0] - teacher.detach().softmax(-1)[:, 0]
    torch.testing.assert_close(student.grad[:, 0], expected)
    assert student.grad[:, 1].abs().max() == 0


def test_the_next_token_loss_reads_the_prediction_of_the_position_before():
    tokens = torch.tensor([[0, 1, 2]])
    logits = torch.stack(
        [logits_of(0.1, 0.8, 0.1), logits_of(0.2, 0.2, 0.6), logits_of(1.0, 1e-9, 1e-9)]
    )[None]
    assert next_token_loss(logits, tokens).item() == pytest.approx(
        -(math.log(0.8) + math.log(0.6)) / 2
    )


@pytest.mark.parametrize("target", [0.25, 0.5, 0.75])
def test_the_budget_is_one_at_its_target_and_one_over_it_where_all_is_kept(target):
    keep = torch.zeros(3, 8, dtype=torch.float64)
    keep[:, : int(8 * target)] = 1
    assert budget_loss(keep, torch.full_like(keep, target), target).item() == pytest.approx(
        1.0, abs=1e-15
    )
    assert budget_loss(torch.ones(2, 6), torch.ones(2, 6), target).item() == pytest.approx(
        1 / target
    )


def test_the_budget_at_one_nth_is_the_ratio_loss_of_h_net_averaged_over_sequences():
    keep = (torch.arange(10) < torch.tensor([[9], [2]])).double()
    prob = (normal(2, 10) + torch.tensor([[1.0], [-1.0]])).sigmoid()
    F = keep.mean(1)
    G = prob.mean(1)
    N = 6
    ratio_loss = (N / (N - 1) * ((N - 1) * F * G + (1 - F) * (1 - G))).mean().item()
    pooled = N / (N - 1) * ((N - 1) * F.mean() * G.mean() + (1 - F.mean()) * (1 - G.mean())).item()
    assert abs(pooled - ratio_loss) > 1e-3
    assert budget_loss(keep, prob, 1 / N).item() == pytest.approx(ratio_loss, abs=1e-14)


def test_the_kept_fraction_carries_no_gradient_and_the_probabilities_do():
    keep, prob = (
        torch.full((1, 4), x, dtype=torch.float64, requires_grad=True) for x in (1.0, 0.9)
    )
    budget_loss(keep, prob, 0.25).backward()
    assert keep.grad is None
    expected = torch.full((1, 4), (1 - 0.25) / (0.25 * 0.75) / 4, dtype=torch.float64)
    torch.testing.assert_close(prob.grad, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_losses_are_float32_and_double_stays_double(dtype):
    logits = normal(1, 4, 5).to(dtype)
    tokens = torch.tensor([[0, 1, 2, 3]])
    prob = torch.full((1, 4), 0.3, dtype=dtype)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    values = (
        next_token_loss(logits, tokens),
        distillation_kl(logits, logits),
        budget_loss(prob, prob, 0.5),
    )
    assert [value.dtype for value in values] == [expected] * 3


def test_a_target_outside_zero_to_one_and_a_sequence_of_one_token_are_rejected():
    for target in (0.0, 1.0, float("nan")):
        with pytest.raises(InputError, match=str(target)):
            budget_loss(torch.ones(1, 2), torch.ones(1, 2), target)
    logits = torch.zeros(1, 1, 3)
    for loss, second in (
        (next_token_loss, torch.zeros(1, 1, dtype=torch.long)),
        (distillation_kl, logits),
    ):
        with pytest.raises(InputError, match="1 tokens"):
            loss(logits, second)


@pytest.mark.parametrize("chunk", [256, 1, 4])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_scores_at_every_position_are_those_of_the_whole_logits(chunk, softcap):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = OutputHead(torch.nn.Linear(6, 13, dtype=torch.float64), 1.3, softcap)
    hidden = normal(2, 5, 6)
    teacher = normal(2, 5, 6, seed=1)
    targets = torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(0))
    student, taught = (head.logits(x).log_softmax(-1).detach() for x in (hidden, teacher))
    nll, nll_teacher = (-x.gather(-1, targets[..., None])[..., 0] for x in (student, taught))
    kl = (taught.exp() * (taught - student)).sum(-1)
    top1 = (taught.argmax(-1) == student.argmax(-1)).double()
    sizes = {"chunk_tokens": chunk, "block_tokens": 2}
    scores = vars(score_positions(head, hidden, targets, teacher, **sizes))
    alone = score_positions(head, hidden, targets, **sizes)
    for name, values in {"nll": nll, "nll_teacher": nll_teacher, "kl": kl, "top1": top1}.items():
        torch.testing.assert_close(scores[name], values, rtol=1e-12, atol=1e-13)
    assert torch.equal(alone.nll, scores["nll"])
    assert (alone.nll_teacher, alone.kl, alone.top1) == (None, None, None)
