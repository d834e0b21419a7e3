"""What a sample costs the GPT, from its shape alone. Needs no torch."""

from __future__ import annotations

from hetero_fw.hardware import LayerProfile, WorkloadProfile

_BYTES = 4
_MLP_RATIO = 4


def gpt_workload(
    *,
    vocab_size: int,
    sequence_length: int,
    num_layers: int,
    num_heads: int,
    model_dim: int,
) -> WorkloadProfile:
    """Profile of `GPTModule` with the same arguments.

    FLOPs count matrix products and attention, a multiply-add as two; norms, activations and the
    embedding look-up are left out. The backward pass of a matrix product costs two of them; that
    of attention 2.5, because it computes the scores again instead of keeping them
    (FlashAttention, Dao et al. 2022). The causal mask is not credited.
    """
    block = _block(sequence_length, num_heads, model_dim)
    blocks = (
        LayerProfile(
            name=f"model.blocks.{index}",
            num_params=block.num_params,
            forward_flops=block.forward_flops,
            backward_flops=block.backward_flops,
            activation_bytes=block.activation_bytes,
        )
        for index in range(num_layers)
    )
    return WorkloadProfile(
        name="gpt",
        layers=(
            _embedding(vocab_size, sequence_length, model_dim),
            *blocks,
            _head(vocab_size, sequence_length, model_dim),
        ),
        tokens_per_sample=sequence_length,
    )


def _embedding(vocab_size: int, sequence_length: int, model_dim: int) -> LayerProfile:
    return LayerProfile(
        name="model.embedding",
        num_params=(vocab_size + sequence_length) * model_dim,
        forward_flops=0.0,
        backward_flops=0.0,
        # Token numbers, 8 bytes each. The embedding itself is the first block's input.
        activation_bytes=8 * sequence_length,
    )


def _block(sequence_length: int, num_heads: int, model_dim: int) -> LayerProfile:
    # Weights of qkv (3), attention output (1) and the two MLP matrices, in units of D * D.
    num_weights = (3 + 1 + 2 * _MLP_RATIO) * model_dim**2
    # Biases of the same, and two norms with weight and bias.
    num_vectors = (3 + 1 + _MLP_RATIO + 1 + 2 * 2) * model_dim
    matmul_flops = 2.0 * sequence_length * num_weights
    attention_flops = 4.0 * sequence_length**2 * model_dim
    # Kept for backward, in numbers a token: input and output of both norms (4 D), q, k, v (3 D),
    # attention's output (D), the MLP's hidden layer before and after GELU (8 D), the norms' mean
    # and deviation (4) and attention's log-sum-exp (one a head).
    numbers_per_token = (4 + 3 + 1 + 2 * _MLP_RATIO) * model_dim + 4 + num_heads
    return LayerProfile(
        name="model.blocks",
        num_params=num_weights + num_vectors,
        forward_flops=matmul_flops + attention_flops,
        backward_flops=2.0 * matmul_flops + 2.5 * attention_flops,
        activation_bytes=_BYTES * sequence_length * numbers_per_token,
    )


def _head(vocab_size: int, sequence_length: int, model_dim: int) -> LayerProfile:
    matmul_flops = 2.0 * sequence_length * vocab_size * model_dim
    # Input and output of the norm, its mean and deviation, and the log-probabilities.
    numbers_per_token = 2 * model_dim + 2 + vocab_size
    return LayerProfile(
        name="model.head",
        num_params=vocab_size * model_dim + 2 * model_dim,
        forward_flops=matmul_flops,
        backward_flops=2.0 * matmul_flops,
        activation_bytes=_BYTES * sequence_length * numbers_per_token,
    )
