"""Common functions of PyTorch on small tensors of the host: each has the values that PyTorch itself gives it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from echograph.frontend.pytorch.capture import fake_mode
from echograph.frontend.pytorch.device_ops import cpu_operators
from echograph.frontend.pytorch.known_values import apart, is_known
from echograph.frontend.scripts import device
from echograph.frontend.scripts.adapter import unpatched
from echograph.frontend.scripts.recorder import ScriptRecorder
from echograph.frontend.scripts.world import World

MADE = """
torch.Tensor(np.arange(4.))
torch.Tensor(np.arange(4,dtype=np.float32))
torch.Tensor([1.,2.,3.])
torch.Tensor([1,2,3])
torch.Tensor([[1,2],[3,4]])
torch.FloatTensor(np.arange(4.))
torch.FloatTensor([1,2])
torch.FloatTensor(np.arange(4))
torch.LongTensor(np.arange(4))
torch.LongTensor([1,2])
torch.DoubleTensor(np.arange(4.))
torch.IntTensor([1,2])
torch.BoolTensor([True,False])
torch.ByteTensor([1,0])
torch.LongTensor(range(4))
torch.FloatTensor((1,2))
torch.FloatTensor([np.float64(3),np.float64(4)])
torch.LongTensor([a(3)[1],a(3)[2]])
torch.FloatTensor(a(3).float())
torch.Tensor(a(3).float())
torch.Tensor([1.,2.]).long()
a(3).new([1,2])
a(3).new_tensor([1,2])
a(3).new_full((2,),5)
a(3).float().new([1,2])
torch.from_numpy(np.arange(4.))
torch.as_tensor([1,2])
torch.asarray([1,2])
torch.asarray(np.arange(3))
torch.scalar_tensor(3.)
torch.tensor(np.arange(3.))
torch.tensor([3,1,2]).sort()[0]
torch.tensor([3,1,2]).sort()[1]
torch.tensor([3,1,2]).argsort()
torch.tensor([3,1,1]).unique()
torch.tensor([3,1,1]).unique(return_inverse=True)[1]
torch.tensordot(torch.ones(2,2),torch.ones(2,2),dims=1)
torch.tensor_split(a(4),2)[1]
torch.from_numpy(a(4).numpy())
torch.tensor(list(a(3)))
torch.ones(1).new(np.arange(3.))
torch.frombuffer(bytearray(3), dtype=torch.uint8)
"""
COMPUTED = """
F.one_hot(a(4))
F.one_hot(a(4)).float()
F.one_hot(a(4),6)
F.one_hot(a(4),num_classes=-1)
a(4).cumsum(0)
torch.cumprod(a(4)+1,0)
a(4).flip(0)
torch.fliplr(a(4).view(2,2))
torch.roll(a(4),1)
torch.rot90(a(4).view(2,2))
torch.stack([a(3),a(3)])
torch.cat([a(3),a(3)])
torch.hstack([a(3),a(3)])
torch.vstack([a(3),a(3)])
torch.dstack([a(3),a(3)])
torch.concatenate([a(3),a(3)])
torch.where(a(4)>1,a(4),-a(4))
torch.where(a(4)>1)[0]
torch.where(a(4)>1,1.,0.)
a(4).where(a(4)>1,torch.tensor(9))
a(4).masked_fill(a(4)>1,0)
a(4).masked_fill_(a(4)>1,0)
torch.zeros(4).masked_fill(a(4)>1,float('-inf'))
a(4).masked_scatter(a(4)>1,torch.tensor([7,8]))
torch.bincount(a(4))
torch.bincount(a(4),minlength=9)
a(4).bincount()
torch.histc(a(4).float(),4,0,3)
torch.sort(torch.tensor([3,1,2]),descending=True).values
torch.unique(torch.tensor([3,1,1]))
torch.unique(torch.tensor([3,1,1]),return_counts=True)[1]
torch.unique(torch.tensor([[3,1],[3,1]]),dim=0)
torch.unique_consecutive(torch.tensor([1,1,2]))
torch.unique_consecutive(torch.tensor([1,1,2]),return_counts=True)[1]
torch.tril(torch.ones(3,3))
torch.ones(3,3).triu(1)
torch.triu(torch.ones(3,3,dtype=torch.bool),1)
torch.triu(torch.full((3,3),float('-inf')),diagonal=1)
torch.tril_indices(3,3)
torch.linspace(0,1,5)
torch.logspace(0,1,5)
torch.meshgrid(a(2),a(3),indexing="ij")[0]
torch.meshgrid([a(2),a(3)],indexing="ij")[1]
torch.cartesian_prod(a(2),a(3))
torch.combinations(a(3))
torch.gather(a(4),0,torch.tensor([1,2]))
a(4).gather(0,torch.tensor([1,2]))
torch.zeros(4).scatter(0,torch.tensor([1,2]),1.)
torch.zeros(4).scatter_(0,torch.tensor([1,2]),1.)
torch.zeros(4).scatter_add_(0,torch.tensor([1,2]),torch.ones(2))
torch.zeros(4).scatter_reduce(0,torch.tensor([1,2]),torch.ones(2),"sum")
a(4).index_put((torch.tensor([1]),),torch.tensor(9))
a(4).index_put_((torch.tensor([1]),),torch.tensor(9))
torch.zeros(4).index_add_(0,torch.tensor([1]),torch.ones(1))
torch.zeros(4).index_fill(0,torch.tensor([1]),5.)
torch.zeros(4).index_copy(0,torch.tensor([1]),torch.ones(1))
a(4).index_select(0,torch.tensor([1]))
torch.take(a(4),torch.tensor([1]))
torch.take_along_dim(a(4),torch.tensor([1]),0)
torch.einsum("i,j->ij",a(2).float(),a(3).float())
torch.outer(a(2),a(3))
torch.kron(a(2),a(3))
torch.ones(2,2)@torch.ones(2,2)
torch.mm(torch.ones(2,2),torch.ones(2,2))
torch.bmm(torch.ones(1,2,2),torch.ones(1,2,2))
torch.dot(a(3),a(3))
a(5)[[1,2]]
a(5)[None,:2]
a(5)[a(5)>2]
a(6).view(2,3)[...,0]
torch.nonzero(a(4)>1)
(a(4)>1).nonzero(as_tuple=True)[0]
torch.argwhere(a(4)>1)
torch.count_nonzero(a(4))
torch.topk(a(4),2)[0]
torch.kthvalue(a(4),2)[0]
a(4).argmax()
a(4).max(0)[0]
torch.min(a(4))
torch.maximum(a(4),torch.tensor(2))
torch.max(a(4),torch.tensor(2))
a(4).clamp(1,2)
a(4).clamp_(1,2)
torch.searchsorted(a(4),torch.tensor([2]))
torch.bucketize(torch.tensor([2]),a(4))
torch.diff(a(4))
torch.diag(a(3))
torch.diag_embed(a(3))
torch.block_diag(torch.ones(1,1),torch.ones(2,2))
torch.eye(3)
torch.eye(3,dtype=torch.bool)
F.pad(a(3),(1,1))
F.pad(a(3),(1,1),value=7)
torch.nn.utils.rnn.pad_sequence([a(3),a(2)],batch_first=True)
a(5).unfold(0,2,1)
F.unfold(a(16).float().view(1,1,4,4),2)
a(4).chunk(2)[1]
a(4).split([1,3])[1]
a(4).unbind()[1]
a(2).repeat(2)
a(2).repeat_interleave(2)
torch.repeat_interleave(torch.tensor([1,2]))
torch.tile(a(2),(2,))
a(2).expand(3,2)
torch.broadcast_tensors(a(2),torch.ones(1))[1]
torch.broadcast_to(a(2),(2,2))
a(4).view(2,2).permute(1,0)
a(4).view(2,2).T
a(4).view(2,2).mT
torch.movedim(a(4).view(2,2),0,1)
a(4).view(2,2).swapaxes(0,1)
a(1).squeeze()
a(2).unsqueeze_(0)
a(4).unflatten(0,(2,2))
a(4).ravel()
torch.complex(torch.ones(2),torch.ones(2)).real
torch.polar(torch.ones(2),torch.zeros(2)).real
torch.view_as_real(torch.polar(torch.ones(2),torch.zeros(2)))
torch.view_as_complex(torch.ones(2,2)).imag
torch.fft.fftfreq(4)
torch.div(a(4),2,rounding_mode="floor")
a(4)//2
7//(a(4)+1)
1-a(4)
1.0/(a(4)+1)
2**a(4)
a(4)**2
torch.pow(2.0,a(4))
a(4)%2
torch.remainder(a(4),2)
torch.fmod(a(4),2)
a(4)<<1
(a(4)>1)&(a(4)<3)
(a(4)>1)|(a(4)<1)
(a(4)>1)^(a(4)<1)
~(a(4)>1)
torch.logical_and(a(4)>1,a(4)<3)
torch.logical_not(a(4)>1)
torch.isin(a(4),torch.tensor([1,2]))
torch.isfinite(a(4).float())
torch.isnan(a(4).float())
(a(4)>=0).all()
(a(4)>=0).view(2,2).any(1)
a(4)==2
torch.exp(a(4))
torch.exp(-torch.arange(0,4,2).float()*(np.log(10000.)/4))
(a(4)+1).log()
a(4).float().sin()
(a(4)+1).rsqrt()
F.softmax(a(4).float(),0)
a(4).float().softmax(0)
torch.sigmoid(a(4).float())
F.relu(a(4).float())
F.normalize(a(4).float(),dim=0)
a(4).float().norm()
torch.linalg.norm(a(4).float())
torch.linalg.inv(torch.eye(2))
torch.eye(2).inverse()
torch.det(torch.eye(2))
torch.linalg.eigh(torch.eye(2))[0]
a(4).float().mean()
a(4).float().std()
torch.var_mean(a(4).float())[1]
a(5).median()
a(4).view(2,2).median(1)[0]
a(4).mode()[0]
torch.quantile(a(4).float(),.5)
(a(4)+1).prod()
torch.logsumexp(a(4).float(),0)
torch.cummax(a(4),0)[0]
a(4).amax(0)
torch.aminmax(a(4))[1]
torch.cdist(torch.ones(2,2),torch.zeros(2,2))
torch.cross(torch.ones(3),torch.ones(3),dim=0)
torch.trace(torch.eye(3))
F.interpolate(torch.ones(1,1,4,4),scale_factor=2)
F.interpolate(torch.ones(1,1,4,4),size=(2,2),mode="bilinear")
F.affine_grid(torch.ones(1,2,3),(1,1,2,2),align_corners=False)
F.grid_sample(torch.ones(1,1,2,2),torch.zeros(1,2,2,2),align_corners=False)
F.max_pool2d(torch.ones(1,1,4,4),2)
F.avg_pool2d(torch.ones(1,1,4,4),2)
F.adaptive_avg_pool1d(torch.ones(1,1,4),2)
F.conv1d(torch.ones(1,1,4),torch.ones(1,1,2))
F.embedding(a(2),torch.ones(3,3))
F.cross_entropy(torch.ones(2,3),a(2))
F.mse_loss(torch.ones(2),torch.zeros(2))
F.pixel_unshuffle(torch.ones(1,1,4,4),2)
torch.lerp(torch.zeros(2),torch.ones(2),.5)
torch.addcmul(torch.zeros(2),torch.ones(2),torch.ones(2))
torch.addmm(torch.zeros(2,2),torch.ones(2,2),torch.ones(2,2))
torch.baddbmm(torch.zeros(1,2,2),torch.ones(1,2,2),torch.ones(1,2,2))
a(4).clone()
a(4).detach()
a(4).view(2,2).t().contiguous()
a(4).to(torch.float32)
a(4).type(torch.FloatTensor)
a(4).type(torch.float32)
a(4).type_as(torch.ones(1))
a(4).view(torch.int32)
a(4).double()
a(4).bfloat16().float()
a(4).to(torch.ones(1))
torch.zeros_like(a(4))
torch.full_like(a(4),3)
torch.empty(4).copy_(a(4))
torch.add(a(4),1,out=torch.empty(4,dtype=torch.long))
a(4).narrow(0,1,2)
a(4).select(0,1)
torch.eye(3).diagonal()
torch.zeros(3,3).fill_diagonal_(1)
torch.cov(torch.eye(3))
torch.corrcoef(a(6).float().view(2,3))
torch.trapz(a(3).float())
torch.nan_to_num(a(3).float())
torch.heaviside(a(3).float(),torch.tensor(1.))
torch.erf(a(3).float())
torch.lgamma(a(3).float()+1)
(a(3).float()+.2).round()
(a(3)/2).floor().int()
(a(3)/2).ceil()
(-a(3)).abs()
-a(3)
torch.sign(a(3))
torch.atan2(a(3).float(),a(3).float())
sum(a(3))
max(a(3))
torch.stack(sorted(torch.tensor([2,1])))
torch.nn.init.dirac_(torch.empty(2,2,1))
torch.nn.init.constant_(torch.empty(2),3.)
torch.nn.init.eye_(torch.empty(2,2))
torch.distributions.Categorical(probs=torch.ones(2)/2).probs
torch._utils._flatten_dense_tensors([torch.ones(2)])
torch.nn.utils.parameters_to_vector([torch.ones(2)])
torch.renorm(torch.ones(2,2),2,0,1.)
torch.vander(a(3))
torch.unravel_index(torch.tensor(3),(2,2))[0]
torch.nn.Parameter(torch.ones(3),requires_grad=False)+0
torch.ones(3,requires_grad=True).detach()+0
a(3).bool()
a(3).half().float()
a(3).char()
torch.view_as_real(torch.complex(torch.ones(2),torch.ones(2))*2)
torch.complex(torch.ones(2),torch.ones(2)).conj().real
torch.complex(torch.ones(2),torch.ones(2)).angle()
torch.linalg.lu(torch.eye(2))[1]
torch.linalg.qr(torch.eye(2))[1].abs()
torch.linalg.cholesky(torch.eye(2))
torch.linalg.solve(torch.eye(2),torch.ones(2,1))
torch.linalg.pinv(torch.eye(2))
torch.linalg.lstsq(torch.eye(2),torch.ones(2,1))[0]
torch.matrix_exp(torch.zeros(2,2))
torch.matrix_power(torch.eye(2),2)
F.log_softmax(torch.ones(2),0)
"""
WRITTEN = """
torch.ones_like(input=a(3))
torch.sort(input=torch.tensor([2, 1])).values
torch.cat(tensors=[a(2), a(3)])
init.constant_(torch.empty(2), 3.0)
init.eye_(torch.empty(2, 2))
init.dirac_(torch.empty(2, 2, 1))
torch.add(a(4), 1, out=torch.empty(4, dtype=torch.long))
torch.arange(3, out=torch.empty(3, dtype=torch.long))
written(torch.zeros(3, 3, dtype=torch.bool), [(0, slice(a(3)[2])), (1, slice(a(3)[1], None))], True)
written(a(6), [a(6) % 2 == 0, [1, 3]], 7)
written(torch.empty(3, dtype=torch.long), range(3), 5)
written(torch.empty(2, 2), [0, (1, slice(None))], a(2).float())
written(torch.zeros(3), [0, a(2), -1], 5)
written(torch.zeros(2, 4), [(slice(None), slice(0, None, 2)), (..., 1)], a(2.0)[:, None].sum())
written(torch.from_numpy(np.zeros(3)), [0], 5)
"""
HEAD = """
import math
import numpy as np
import torch
import torch.nn.functional as F
from torch.nn import init
a = torch.arange
def written(tensor, places, value):
    for place in places:
        tensor[place] = value
    return tensor
CALLS = [
"""


def several(lines: str, size: int = 12) -> list[list[str]]:
    texts = [line for line in lines.splitlines() if line]
    return [texts[i : i + size] for i in range(0, len(texts), size)]


@pytest.mark.parametrize("texts", several(MADE + COMPUTED + WRITTEN))
def test_small_tensors_of_the_host_have_their_values(texts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "calls.py"
    path.write_text(HEAD + "".join(f"    lambda: {text},\n" for text in texts) + "]\n")
    calls = runpy.run_path(str(path))["CALLS"]
    with apart():
        expected = [repr(call().tolist()) for call in calls]
    world = World(size=2)
    with world.entered(tuple), fake_mode(unpatched) as mode, device.present(world), ScriptRecorder(mode):
        made = [repr(call().tolist()) for call in calls]
    assert dict(zip(texts, made, strict=True)) == dict(zip(texts, expected, strict=True))


def test_classes_that_nobody_has_the_number_of_are_a_guess_that_is_told() -> None:
    warned: list[str] = []
    world = World(size=1)
    shown = device.present(world, warn=warned.append)
    with world.entered(tuple), fake_mode(unpatched) as mode, shown, ScriptRecorder(mode):
        assert F.one_hot(torch.arange(4, device="cuda")).shape == (4, 4) and not warned
        assert F.one_hot(torch.randint(5, (4,), device="cuda")).shape == (4, 2)
    assert len(warned) == 1 and "makes a size of a tensor's value" in warned[0]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_a_connectionist_loss_of_known_lengths(reduction: str) -> None:
    """Of the mean, which is the default, PyTorch's own code reads the lengths from memory."""
    world = World(size=1)
    shown = device.present(world)
    with world.entered(tuple), fake_mode(unpatched) as mode, cpu_operators(), shown, ScriptRecorder(mode):
        lengths, labels = torch.tensor([3, 2]), torch.tensor([[1, 2, 3], [1, 2, 0]])
        scores = torch.zeros(20, 2, 5, device="cuda").requires_grad_().log_softmax(-1)
        loss = F.ctc_loss(scores, labels.cuda(), torch.full((2,), 20), lengths, reduction=reduction)
        assert loss.is_cuda and loss.shape == ((2,) if reduction == "none" else ())
        loss.sum().backward()


def test_a_tensor_of_no_values_is_known_once_every_part_was_given_and_nothing_else_wrote_there() -> None:
    world = World(size=2)
    with world.entered(tuple), fake_mode(unpatched) as mode, device.present(world), ScriptRecorder(mode):
        partly, viewed, unknown, filled = (torch.empty(3, dtype=torch.long) for _ in range(4))
        view = viewed[:2]
        for place in range(3):
            viewed[place], filled[place] = place, place
            unknown[place] = torch.randn(3, device="cuda").argmax() if place else 1
        partly[:2] = 1
        del view
        assert [is_known(one) for one in (partly, viewed, unknown, filled)] == [False, False, False, True]
        assert filled.tolist() == [0, 1, 2]
