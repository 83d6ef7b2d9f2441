"""The class of every ATen operator that models are made of; overloads and in-place forms are alike.

An operator that is not listed is priced by its bytes alone (class "other") and named by `notes`.
"""

_BY_CLASS: dict[str, str] = {
    "gemm": """mm addmm bmm baddbmm addbmm linear matmul mv addmv dot vdot _scaled_mm _int_mm
        _addmm_activation _weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int8pack_mm
        _trilinear bilinear mkldnn_linear _cslt_sparse_mm""",
    "grouped": "_grouped_mm _scaled_grouped_mm",
    "prefill": """scaled_dot_product_attention _scaled_dot_product_attention_math
        _scaled_dot_product_attention_math_for_mps _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
        _flash_attention_forward _efficient_attention_forward _cudnn_attention_forward paged_attention""",
    "norm": """native_layer_norm layer_norm _fused_rms_norm rms_norm native_group_norm group_norm
        native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
        cudnn_batch_norm batch_norm instance_norm native_layer_norm_backward native_group_norm_backward
        _fused_rms_norm_backward""",
    "softmax": """_softmax _log_softmax softmax log_softmax _safe_softmax logsumexp _masked_softmax
        _softmax_backward_data _log_softmax_backward_data""",
    "reduction": """sum mean amax amin max min prod any all var std var_mean std_mean norm linalg_vector_norm
        count_nonzero nansum aminmax median mode avg_pool2d max_pool2d_with_indices avg_pool3d
        _adaptive_avg_pool2d adaptive_avg_pool1d max_pool3d_with_indices nll_loss_forward equal
        mse_loss l1_loss smooth_l1_loss""",
    "sampling": "argmax argmin topk sort multinomial kthvalue msort argsort",
    "scan": """cumsum cumprod cummax cummin logcumsumexp _cummax_helper _cummin_helper bucketize
        searchsorted nonzero nonzero_static _unique2 unique_dim unique_consecutive masked_select
        histc bincount""",
    "gather": """embedding index _unsafe_index index_select gather take take_along_dim _embedding_bag
        _embedding_bag_forward_only grid_sampler_2d""",
    "scatter": """index_put _index_put_impl index_copy index_add index_fill scatter scatter_add
        scatter_reduce slice_scatter select_scatter masked_scatter put index_reduce
        embedding_dense_backward nll_loss_backward""",
    "conv": """convolution _convolution cudnn_convolution conv1d conv2d conv3d convolution_overrideable
        _conv_depthwise2d conv_depthwise3d mkldnn_convolution cudnn_convolution_relu
        slow_conv_transpose2d thnn_conv2d _slow_conv2d_forward""",
    "copy": """copy clone contiguous _to_copy to cat stack fill zero zeros ones full zeros_like ones_like
        full_like new_zeros new_ones new_full repeat repeat_interleave constant_pad_nd roll flip tril
        triu tril_indices triu_indices arange linspace eye scalar_tensor lift_fresh_copy
        _local_scalar_dense item pixel_shuffle pixel_unshuffle im2col col2im _reshape_copy
        view_copy expand_copy permute_copy _unsafe_masked_index reflection_pad1d reflection_pad2d
        replication_pad1d replication_pad2d replication_pad3d split_with_sizes_copy unfold_copy
        channel_shuffle range _pin_memory""",
    "elementwise": """add sub rsub mul div true_divide floor_divide remainder fmod pow square sqrt rsqrt
        reciprocal exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asin acos atan atan2
        sigmoid silu gelu relu relu6 leaky_relu elu celu selu hardswish hardsigmoid hardtanh mish softplus
        glu neg abs sign sgn ceil floor round trunc frac clamp clamp_min clamp_max maximum minimum fmax
        fmin where masked_fill lerp addcmul addcdiv erf erfc erfinv eq ne lt le gt ge logical_and
        logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
        bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ isnan isinf
        isfinite isin nan_to_num polar complex real imag angle threshold softshrink hardshrink
        native_dropout dropout bernoulli rand randn rand_like randn_like randint randint_like normal
        uniform exponential random hypot xlogy sinc logit log_sigmoid_forward prelu _prelu_kernel rrelu
        upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d
        upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
        threshold_backward gelu_backward silu_backward sigmoid_backward tanh_backward mse_loss_backward
        _foreach_add _foreach_mul _foreach_sub _foreach_div _foreach_neg _foreach_sqrt _foreach_lerp
        _foreach_addcmul _foreach_addcdiv _fused_sgd _fused_adam _fused_adamw _fused_adagrad
        fused_moving_avg_obs_fake_quant quantize_per_tensor
        dequantize _fake_quantize_learnable_per_tensor_affine fake_quantize_per_tensor_affine
        special_expm1 gcd lcm heaviside copysign signbit nextafter ldexp logaddexp logaddexp2""",
    "allocation": """empty empty_strided empty_like new_empty new_empty_strided empty_permuted detach alias
        view _unsafe_view reshape _reshape_alias expand permute transpose t slice select squeeze unsqueeze
        as_strided split split_with_sizes unbind chunk narrow diagonal unfold lift_fresh set
        view_as_real view_as_complex resize record_stream""",
}
OPERATORS: dict[str, str] = {name: op for op, names in _BY_CLASS.items() for name in names.split()}

# Position of `is_causal` among the arguments.
CAUSAL_ARG: dict[str, int] = {
    "scaled_dot_product_attention": 5,
    "_scaled_dot_product_attention_math": 5,
    "_scaled_dot_product_attention_math_for_mps": 5,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_fused_attention_overrideable": 5,
    "_flash_attention_forward": 8,
    "_cudnn_attention_forward": 10,
}
