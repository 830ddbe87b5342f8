"""A few training steps for a model, an optimizer or a loss of each library.

A program imports its library when it runs, and raises `ImportError` if the library is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.pytorch.libraries.trained import Train

PROGRAMS: dict[str, Train] = {}
LIBRARIES: dict[str, str] = {}  #: the packages for `pip install`, by program

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def needs(*packages: str) -> Callable[[Train], Train]:
    """Register a program under its name, with the packages that it needs."""

    def register(program: Train) -> Train:
        _register(program.__name__, " ".join(packages), program)
        return program

    return register


def _register(name: str, packages: str, program: Train) -> None:
    PROGRAMS[name], LIBRARIES[name] = program, packages


def program_of(name: str) -> Train:
    return PROGRAMS[name] if name in PROGRAMS else architecture(name)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3)


def trained(
    model: nn.Module, loss_of: Callable[[], Tensor], steps: int = 3, make: MakeOptimizer = adam
) -> Sequence[Tensor]:
    """Train for some steps; return the losses and the parameters."""
    model.train()
    optimizer = make(p for p in model.parameters() if p.requires_grad)
    losses: list[Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return [*losses, *model.parameters()]


def size_of(results: Any) -> Tensor:
    """Return a loss: the sum of the mean squares of the results that require a gradient."""
    found: list[Tensor] = []

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            if value.is_floating_point() and value.requires_grad:
                found.append(value.square().mean())
        elif isinstance(value, dict):
            list(map(look, value.values()))
        elif isinstance(value, list | tuple):
            list(map(look, value))

    look(results)
    return torch.stack(found).sum()


def perceptron(*widths: int) -> nn.Sequential:
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


# -- vision ---------------------------------------------------------------------------------------


def _vit(name: str, path: str, **options: Any) -> None:
    def program() -> Sequence[Tensor]:
        module, _, kind = path.rpartition(".")
        model = getattr(import_module(module), kind)(**options)
        return trained(model, lambda: size_of(model(torch.randn(4, 3, 64, 64))))

    _register(name, "vit-pytorch einops", program)


_SQUARE = {"image_size": 64, "patch_size": 16, "num_classes": 10, "dim": 64, "depth": 4,
           "heads": 4, "mlp_dim": 128}  # fmt: skip
_vit("vit", "vit_pytorch.ViT", **_SQUARE, dropout=0.1, emb_dropout=0.1)
_vit("deepvit", "vit_pytorch.deepvit.DeepViT", **_SQUARE)
_vit("cait", "vit_pytorch.cait.CaiT", **_SQUARE, cls_depth=2, layer_dropout=0.1)
_vit("nest", "vit_pytorch.nest.NesT", image_size=64, patch_size=4, dim=24, heads=3,
     num_hierarchies=3, block_repeats=(1, 1, 2), num_classes=10)  # fmt: skip
_vit("regionvit", "vit_pytorch.regionvit.RegionViT", dim=(16, 32, 48, 64), depth=(1, 1, 1, 1),
     window_size=2, num_classes=10)  # fmt: skip


def _segmentation(kind: str) -> None:
    def program() -> Sequence[Tensor]:
        smp = import_module("segmentation_models_pytorch")
        model = getattr(smp, kind)("resnet18", encoder_weights=None, classes=3)
        loss = smp.losses.DiceLoss("multiclass")
        return trained(
            model,
            lambda: loss(model(torch.randn(2, 3, 64, 64)), torch.randint(0, 3, (2, 64, 64))),
            steps=2,
        )

    _register(f"segmentation_{kind}", "segmentation-models-pytorch", program)


for _kind in ("Unet", "UnetPlusPlus", "FPN", "DeepLabV3Plus", "MAnet", "Segformer"):
    _segmentation(_kind)


@needs("monai")
def medical_segresnet() -> Sequence[Tensor]:
    nets, losses = import_module("monai.networks.nets"), import_module("monai.losses")
    model = nets.SegResNet(spatial_dims=3, init_filters=8, in_channels=1, out_channels=2)
    loss = losses.DiceCELoss(to_onehot_y=True, softmax=True)

    def loss_of() -> Tensor:
        images, labels = torch.randn(1, 1, 32, 32, 32), torch.randint(0, 2, (1, 1, 32, 32, 32))
        result: Tensor = loss(model(images), labels)
        return result

    return trained(model, loss_of, steps=2)


@needs("kornia", "kornia-rs")
def augmented() -> Sequence[Tensor]:
    augmentation = import_module("kornia.augmentation")
    change = nn.Sequential(
        augmentation.RandomHorizontalFlip(),
        augmentation.ColorJitter(0.1, 0.1, 0.1, 0.1),
        augmentation.RandomAffine(15.0),
        augmentation.RandomPerspective(),
    )
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(),
                          nn.Linear(16 * 32 * 32, 10))  # fmt: skip
    return trained(model, lambda: size_of(model(change(torch.rand(8, 3, 32, 32)))))


@needs("denoising-diffusion-pytorch", "einops", "ema-pytorch")
def diffusion() -> Sequence[Tensor]:
    library = import_module("denoising_diffusion_pytorch")
    net = library.Unet(dim=16, dim_mults=(1, 2), flash_attn=False)
    model = library.GaussianDiffusion(net, image_size=32, timesteps=100)
    return trained(model, lambda: model(torch.rand(2, 3, 32, 32)), steps=2)


# -- sequences ------------------------------------------------------------------------------------


def _decoder(name: str, **options: Any) -> None:
    def program() -> Sequence[Tensor]:
        x = import_module("x_transformers")
        layers = x.Decoder(dim=64, depth=4, heads=4, **options)
        model = x.AutoregressiveWrapper(
            x.TransformerWrapper(num_tokens=100, max_seq_len=64, attn_layers=layers)
        )
        return trained(model, lambda: model(torch.randint(0, 100, (4, 64))))

    _register(name, "x-transformers einops einx", program)


_decoder("decoder_rotary", rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)
_decoder("decoder_alibi", alibi_pos_bias=True, attn_qk_norm=True)
_decoder("decoder_dropped", attn_dropout=0.1, ff_dropout=0.1, layer_dropout=0.2)


@needs("performer-pytorch", "local-attention", "axial-positional-embedding")
def reversible() -> Sequence[Tensor]:
    library = import_module("performer_pytorch")
    model = library.PerformerLM(num_tokens=100, max_seq_len=128, dim=64, depth=3, heads=4,
                                causal=False, nb_features=32, reversible=True)  # fmt: skip
    return trained(model, lambda: size_of(model(torch.randint(0, 100, (2, 128)))))


@needs("peft", "transformers")
def low_rank() -> Sequence[Tensor]:
    peft, transformers = import_module("peft"), import_module("transformers")
    config = transformers.GPT2Config(n_layer=4, n_head=4, n_embd=64, vocab_size=200,
                                     n_positions=128)  # fmt: skip
    lora = peft.LoraConfig(r=8, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)

    def loss_of() -> Tensor:
        words = torch.randint(0, 200, (4, 64))
        loss: Tensor = model(input_ids=words, labels=words).loss
        return loss

    return trained(model, loss_of)


# -- science --------------------------------------------------------------------------------------


class _Drift(nn.Module):
    noise_type = "diagonal"

    def __init__(self, sde_type: str) -> None:
        super().__init__()
        self.sde_type = sde_type
        self.drift, self.noise = nn.Linear(8, 8), nn.Linear(8, 8)

    def f(self, _: Tensor, y: Tensor) -> Tensor:
        return self.drift(y).tanh()

    def g(self, _: Tensor, y: Tensor) -> Tensor:
        return self.noise(y).sigmoid()


@needs("torchsde", "trampoline", "boltons", "scipy")
def stochastic() -> Sequence[Tensor]:
    solve = import_module("torchsde").sdeint
    model, times = _Drift("ito"), torch.linspace(0, 1, 20)
    return trained(model, lambda: size_of(solve(model, torch.full((64, 8), 0.1), times, dt=0.05)))


@needs("torchsde", "trampoline", "boltons", "scipy")
def stochastic_adjoint() -> Sequence[Tensor]:
    solve = import_module("torchsde").sdeint_adjoint
    model, times = _Drift("stratonovich"), torch.linspace(0, 1, 5)
    methods = {"dt": 0.05, "method": "midpoint", "adjoint_method": "midpoint"}
    start = torch.full((64, 8), 0.1)
    return trained(model, lambda: size_of(solve(model, start, times, **methods)), steps=2)


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, _: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.net(y)
        return result


def _ode(name: str, solver: str, method: str) -> None:
    def program() -> Sequence[Tensor]:
        solve = getattr(import_module("torchdiffeq"), solver)
        model, times = _Field(), torch.linspace(0, 1, 8)
        return trained(
            model, lambda: size_of(solve(model, torch.ones(64, 8), times, method=method))
        )

    _register(name, "torchdiffeq", program)


_ode("ode", "odeint", "dopri5")
_ode("ode_adjoint", "odeint_adjoint", "dopri5")
_ode("ode_implicit", "odeint", "implicit_adams")


@needs("gpytorch", "linear-operator", "jaxtyping")
def gaussian_process() -> Sequence[Tensor]:
    gp: Any = import_module("gpytorch")
    x = torch.linspace(0, 1, 200)
    y = torch.sin(6.28 * x) + 0.1 * torch.randn(200)

    class Exact(gp.models.ExactGP):
        def __init__(self, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gp.means.ConstantMean()
            self.covar_module = gp.kernels.ScaleKernel(gp.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            mean, covariance = self.mean_module(x), self.covar_module(x)
            return gp.distributions.MultivariateNormal(mean, covariance)

    likelihood = gp.likelihoods.GaussianLikelihood()
    model = Exact(likelihood)
    loss = gp.mlls.ExactMarginalLogLikelihood(likelihood, model)
    return trained(model, lambda: -loss(model(x), y))


@needs("pyro-ppl", "pyro-api")
def variational() -> Sequence[Tensor]:
    """Train with Pyro, which raises errors again as `type(error)(text)` with a longer text."""
    pyro, dist = import_module("pyro"), import_module("pyro.distributions")
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    encoder, decoder = perceptron(100, 64, 20), perceptron(10, 64, 100)
    images = torch.rand(128, 100)

    def model(x: Tensor) -> None:
        pyro.module("decoder", decoder)
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(len(x), 10), 1.0).to_event(1))
            seen = dist.Bernoulli(logits=decoder(z), validate_args=False).to_event(1)
            pyro.sample("x", seen, obs=x)

    def guide(x: Tensor) -> None:
        pyro.module("encoder", encoder)
        with pyro.plate("data", len(x)):
            mean, log_scale = encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(mean, log_scale.exp()).to_event(1))

    optimizer, loss = pyro.optim.Adam({"lr": 1e-3}), pyro.infer.Trace_ELBO()
    inference = pyro.infer.SVI(model, guide, optimizer, loss)
    losses = [torch.tensor(inference.step(images)) for _ in range(3)]
    return [*losses, *encoder.parameters(), *decoder.parameters()]


@needs("egnn-pytorch")
def equivariant() -> Sequence[Tensor]:
    library = import_module("egnn_pytorch")
    model = library.EGNN_Network(num_tokens=21, num_positions=64, dim=32, depth=3,
                                 num_nearest_neighbors=8, coor_weights_clamp_value=2.0)  # fmt: skip
    return trained(
        model, lambda: size_of(model(torch.randint(0, 21, (1, 48)), torch.randn(1, 48, 3)))
    )


def _graph(kind: str) -> None:
    def program() -> Sequence[Tensor]:
        layer = getattr(import_module("torch_geometric.nn"), kind)
        edges = torch.randint(0, 400, (2, 3000))
        layers = nn.ModuleList(layer(64, 64) for _ in range(4))

        def loss_of() -> Tensor:
            x = torch.randn(400, 64)
            for each in layers:
                x = each(x, edges).relu()
            return x.square().mean()

        return trained(layers, loss_of)

    _register(f"graph_{kind}", "torch-geometric xxhash", program)


for _kind in ("GCNConv", "GATConv", "SAGEConv", "TransformerConv", "GENConv"):
    _graph(_kind)


# -- learning -------------------------------------------------------------------------------------


def _optimizer(kind: str) -> None:
    def program() -> Sequence[Tensor]:
        make = getattr(import_module("torch_optimizer"), kind)
        model = perceptron(32, 64, 64, 1)
        return trained(model, lambda: size_of(model(torch.randn(128, 32))), 4, make)

    _register(f"optimizer_{kind}", "torch-optimizer pytorch-ranger", program)


for _kind in ("Lamb", "Shampoo", "AdaBelief", "NovoGrad", "Ranger", "AggMo", "QHAdam"):
    _optimizer(_kind)


def _embedding(kind: str) -> None:
    def program() -> Sequence[Tensor]:
        losses = import_module("pytorch_metric_learning.losses")
        miners = import_module("pytorch_metric_learning.miners")
        loss, miner = getattr(losses, kind)(), miners.MultiSimilarityMiner()
        model, labels = perceptron(32, 128, 32), torch.arange(64) % 5

        def loss_of() -> Tensor:
            found = model(torch.randn(64, 32))
            result: Tensor = loss(found, labels, miner(found, labels))
            return result

        return trained(model, loss_of)

    _register(f"embedding_{kind}", "pytorch-metric-learning scikit-learn", program)


for _kind in ("TripletMarginLoss", "NTXentLoss", "CircleLoss", "FastAPLoss"):
    _embedding(_kind)


@needs("entmax")
def sparse_softmax() -> Sequence[Tensor]:
    entmax = import_module("entmax")
    model = perceptron(32, 64, 64)

    def loss_of() -> Tensor:
        z = model(torch.randn(64, 32))
        return size_of([entmax.entmax15(z, -1), entmax.sparsemax(z, -1)])

    return trained(model, loss_of)


def _agent(kind: str, environment: str, **options: Any) -> None:
    def program() -> Sequence[Tensor]:
        make = getattr(import_module("stable_baselines3"), kind)
        agent = make("MlpPolicy", environment, seed=0, device="cpu", **options)
        agent.learn(128)
        found: Sequence[Tensor] = list(agent.policy.parameters())
        return found

    _register(f"agent_{kind}", "stable-baselines3 gymnasium pandas", program)


_agent("PPO", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2)
_agent("A2C", "CartPole-v1")
_agent("SAC", "Pendulum-v1", learning_starts=50, batch_size=32)
_agent("DQN", "CartPole-v1", learning_starts=50, batch_size=32)


@needs("torchmetrics", "lightning-utilities")
def measured() -> Sequence[Tensor]:
    metrics = import_module("torchmetrics")
    model, labels = perceptron(32, 64, 5), torch.arange(64) % 5
    kinds = [metrics.Accuracy, metrics.F1Score, metrics.AUROC]
    found = [kind("multiclass", num_classes=5) for kind in kinds]

    def loss_of() -> Tensor:
        scores = model(torch.randn(64, 32))
        for each in found:
            each(scores.softmax(-1), labels)
        return F.cross_entropy(scores, labels)

    return [*trained(model, loss_of), *(each.compute() for each in found)]


# -- architectures of transformers ----------------------------------------------------------------

_SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 200, "max_position_embeddings": 256, "d_model": 64,
    "encoder_layers": 2, "decoder_layers": 2, "num_layers": 4, "n_layer": 4, "n_head": 4,
    "n_embd": 64, "n_positions": 256, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "d_ff": 128, "d_kv": 16, "num_heads": 4,
    "n_heads": 4, "n_layers": 4, "dim": 64, "hidden_dim": 128, "embedding_size": 64,
    "image_size": 64, "patch_size": 16, "head_dim": 16, "num_experts": 4, "num_local_experts": 4,
    "moe_intermediate_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "ffn_dim": 128, "num_experts_per_tok": 2, "use_cache": False,
}  # fmt: skip
# most parameters: larger models, whose sizes have other names in the configuration, are left out
_LARGEST = 60_000_000


def architectures() -> list[str]:
    """Return the names of all architectures that transformers has."""
    auto = import_module("transformers.models.auto.modeling_auto")
    return [f"architecture {name}" for name in auto.MODEL_MAPPING_NAMES]


def architecture(name: str) -> Train:
    """Return the program that trains `architecture NAME` with a small configuration."""
    transformers = import_module("transformers")
    kinds = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    kind = kinds[name.removeprefix("architecture ")]
    whole = kind()
    sizes = {
        key: value for key, value in _SMALL.items() if isinstance(getattr(whole, key, None), int)
    }
    config = kind(**sizes)

    def inputs(names: Iterable[str]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if "input_ids" in names:
            found["input_ids"] = torch.randint(3, 199, (4, 64))
        if "decoder_input_ids" in names:
            found["decoder_input_ids"] = torch.randint(3, 199, (4, 32))
        if "pixel_values" in names and "input_ids" not in names:
            side = config.image_size
            found["pixel_values"] = torch.randn(2, config.num_channels, side, side)
        return found

    def program() -> Sequence[Tensor]:
        model = transformers.AutoModel.from_config(config)
        if sum(p.numel() for p in model.parameters()) > _LARGEST:
            raise ImportError(f"{name}: a small configuration has other names of sizes")
        names = inspect.signature(model.forward).parameters  # decorators hide its code
        return trained(model, lambda: size_of(dict(model(**inputs(names)))))

    return program
