graph [
  directed 1
  multigraph 1
  echograph "1.0"
  level "job"
  name "every kind"
  producer "by hand"
  workload "{}"
  streams "[&#34;compute&#34;, &#34;communication&#34;, &#34;host&#34;]"
  mesh "[{&#34;name&#34;: &#34;dp&#34;, &#34;size&#34;: 2}]"
  groups "[{&#34;name&#34;: &#34;dp&#34;, &#34;axes&#34;: [&#34;dp&#34;]}]"
  strings "[&#34;&#34;, &#34;x&#34;, &#34;fp32&#34;, &#34;fp16&#34;, &#34;bf16&#34;, &#34;fp64&#34;, &#34;fp8_e4m3&#34;, &#34;fp8_e5m2&#34;, &#34;int64&#34;, &#34;int32&#34;, &#34;int16&#34;, &#34;int8&#34;, &#34;uint8&#34;, &#34;bool&#34;, &#34;complex64&#34;, &#34;y.0&#34;, &#34;op.0&#34;, &#34;m&#34;, &#34;h100&#34;, &#34;a100&#34;, &#34;b200&#34;, &#34;mi300x&#34;, &#34;y.1&#34;, &#34;op.1&#34;, &#34;y.2&#34;, &#34;op.2&#34;, &#34;y.3&#34;, &#34;op.3&#34;, &#34;y.4&#34;, &#34;op.4&#34;, &#34;y.5&#34;, &#34;op.5&#34;, &#34;y.6&#34;, &#34;op.6&#34;, &#34;y.7&#34;, &#34;op.7&#34;, &#34;y.8&#34;, &#34;op.8&#34;, &#34;y.9&#34;, &#34;op.9&#34;, &#34;y.10&#34;, &#34;op.10&#34;, &#34;all_reduce it&#34;, &#34;all_gather it&#34;, &#34;reduce_scatter it&#34;, &#34;all_to_all it&#34;, &#34;broadcast it&#34;, &#34;reduce it&#34;, &#34;gather it&#34;, &#34;scatter it&#34;, &#34;barrier it&#34;, &#34;to next&#34;, &#34;from last&#34;, &#34;memcpy&#34;, &#34;dataloader&#34;]"
  attributes "[{&#34;kind&#34;: &#34;gemm&#34;}, {&#34;kind&#34;: &#34;gemm&#34;, &#34;transpose_a&#34;: true}, {&#34;kind&#34;: &#34;gemm&#34;, &#34;transpose_b&#34;: true}, {&#34;kind&#34;: &#34;gemm&#34;, &#34;transpose_a&#34;: true, &#34;transpose_b&#34;: true}, {&#34;kind&#34;: &#34;attention&#34;, &#34;heads&#34;: 8, &#34;kv_heads&#34;: 2, &#34;head_dim&#34;: 64, &#34;causal&#34;: true, &#34;dropout&#34;: 0.1}, {&#34;kind&#34;: &#34;attention&#34;, &#34;heads&#34;: 1, &#34;kv_heads&#34;: 1, &#34;head_dim&#34;: 16}, {&#34;kind&#34;: &#34;convolution&#34;, &#34;stride&#34;: [2, 1], &#34;padding&#34;: [1, 0], &#34;dilation&#34;: [1, 3], &#34;groups&#34;: 4, &#34;transposed&#34;: true}, {&#34;kind&#34;: &#34;convolution&#34;, &#34;stride&#34;: [1], &#34;padding&#34;: [0], &#34;dilation&#34;: [1]}, {&#34;kind&#34;: &#34;multi_tensor&#34;, &#34;parts&#34;: 2, &#34;leads&#34;: true}, {&#34;kind&#34;: &#34;multi_tensor&#34;, &#34;parts&#34;: 2}]"
  blocks "[{&#34;name&#34;: &#34;main&#34;, &#34;instances&#34;: [{}]}]"
  programs "[{&#34;calls&#34;: [[0, 0, 26, 0, 0]]}]"
  node [
    id 0
    label "%0 x"
    table "tensor"
    block 0
    row 0
    name "x"
    shape "[4, 8]"
    dtype "fp32"
    role "input"
  ]
  node [
    id 1
    label "%1 fp32"
    table "tensor"
    block 0
    row 1
    name "fp32"
    shape "[2, 3]"
    dtype "fp32"
    role "parameter"
  ]
  node [
    id 2
    label "%2 fp16"
    table "tensor"
    block 0
    row 2
    name "fp16"
    shape "[2, 3]"
    dtype "fp16"
    role "gradient"
  ]
  node [
    id 3
    label "%3 bf16"
    table "tensor"
    block 0
    row 3
    name "bf16"
    shape "[2, 3]"
    dtype "bf16"
    role "optimizer_state"
  ]
  node [
    id 4
    label "%4 fp64"
    table "tensor"
    block 0
    row 4
    name "fp64"
    shape "[2, 3]"
    dtype "fp64"
    role "activation"
  ]
  node [
    id 5
    label "%5 fp8_e4m3"
    table "tensor"
    block 0
    row 5
    name "fp8_e4m3"
    shape "[2, 3]"
    dtype "fp8_e4m3"
    role "input"
  ]
  node [
    id 6
    label "%6 fp8_e5m2"
    table "tensor"
    block 0
    row 6
    name "fp8_e5m2"
    shape "[2, 3]"
    dtype "fp8_e5m2"
    role "buffer"
  ]
  node [
    id 7
    label "%7 int64"
    table "tensor"
    block 0
    row 7
    name "int64"
    shape "[2, 3]"
    dtype "int64"
    role "parameter"
  ]
  node [
    id 8
    label "%8 int32"
    table "tensor"
    block 0
    row 8
    name "int32"
    shape "[2, 3]"
    dtype "int32"
    role "gradient"
  ]
  node [
    id 9
    label "%9 int16"
    table "tensor"
    block 0
    row 9
    name "int16"
    shape "[2, 3]"
    dtype "int16"
    role "optimizer_state"
  ]
  node [
    id 10
    label "%10 int8"
    table "tensor"
    block 0
    row 10
    name "int8"
    shape "[2, 3]"
    dtype "int8"
    role "activation"
  ]
  node [
    id 11
    label "%11 uint8"
    table "tensor"
    block 0
    row 11
    name "uint8"
    shape "[2, 3]"
    dtype "uint8"
    role "input"
  ]
  node [
    id 12
    label "%12 bool"
    table "tensor"
    block 0
    row 12
    name "bool"
    shape "[2, 3]"
    dtype "bool"
    role "buffer"
  ]
  node [
    id 13
    label "%13 complex64"
    table "tensor"
    block 0
    row 13
    name "complex64"
    shape "[2, 3]"
    dtype "complex64"
    role "parameter"
  ]
  node [
    id 14
    label "%14 y.0"
    table "tensor"
    block 0
    row 14
    name "y.0"
    shape "[4, 8]"
    dtype "fp32"
    role "activation"
  ]
  node [
    id 15
    label "%15 y.1"
    table "tensor"
    block 0
    row 15
    name "y.1"
    shape "[4, 8]"
    dtype "fp32"
    role "activation"
  ]
  node [
    id 16
    label "%16 y.2"
    table "tensor"
    block 0
    row 16
    name "y.2"
    shape "[4, 8]"
    dtype "fp32"
    role "activation"
  ]
  node [
    id 17
    label "%17 y.3"
    table "tensor"
    block 0
    row 17
    name "y.3"
    shape "[4, 8]"
    dtype "fp32"
    role "activation"
  ]
  node [
    id 18
    label "%18 y.4"
    table "tensor"
    block 0
    row 18
    name "y.4"
    shape "[4, 8]"
    dtype "fp32"
    role "activation"
  ]
  node [
    id 19
    label "%19 y.5"
    table "tensor"
    block 0
    row 19
    name "y.5"
    shape "[4, 8]"
    dtype "fp32"
    role "activation"
  ]
  node [
    id 20
    label "%20 y.6"
    table "tensor"
    block 0
    row 20
    name "y.6"
    shape "[4, 8]"
    dtype "fp32"
    role "activation"
  ]
  node [
    id 21
    label "%21 y.7"
    table "tensor"
    block 0
    row 21
    name "y.7"
    shape "[4, 8]"
    dtype "fp32"
    role "activation"
  ]
  node [
    id 22
    label "%22 y.8"
    table "tensor"
    block 0
    row 22
    name "y.8"
    shape "[4, 8]"
    dtype "fp32"
    role "activation"
  ]
  node [
    id 23
    label "%23 y.9"
    table "tensor"
    block 0
    row 23
    name "y.9"
    shape "[4, 8]"
    dtype "fp32"
    role "activation"
  ]
  node [
    id 24
    label "%24 y.10"
    table "tensor"
    block 0
    row 24
    name "y.10"
    shape "[4, 8]"
    dtype "fp32"
    role "activation"
  ]
  node [
    id 25
    label "@0 op.0"
    table "operation"
    block 0
    row 0
    kind "compute"
    name "op.0"
    phase "forward"
    module "m"
    durations "[{&#34;device&#34;: &#34;h100&#34;, &#34;picoseconds&#34;: 1500000, &#34;source&#34;: &#34;measured&#34;, &#34;samples&#34;: 20, &#34;spread&#34;: 0.012500000186264515}, {&#34;device&#34;: &#34;a100&#34;, &#34;picoseconds&#34;: 2750000, &#34;source&#34;: &#34;fitted&#34;, &#34;spread&#34;: 0.10000000149011612}, {&#34;device&#34;: &#34;b200&#34;, &#34;picoseconds&#34;: 1, &#34;source&#34;: &#34;analytical&#34;}, {&#34;device&#34;: &#34;mi300x&#34;, &#34;picoseconds&#34;: 0, &#34;source&#34;: &#34;imported&#34;, &#34;samples&#34;: 1}]"
    flops 64
    bytes_read 128
    bytes_written 128
    attributes "{&#34;kind&#34;: &#34;gemm&#34;}"
  ]
  node [
    id 26
    label "@1 op.1"
    table "operation"
    block 0
    row 1
    kind "compute"
    name "op.1"
    phase "backward"
    module "m"
    durations "[{&#34;device&#34;: &#34;h100&#34;, &#34;picoseconds&#34;: 1500000, &#34;source&#34;: &#34;measured&#34;, &#34;samples&#34;: 20, &#34;spread&#34;: 0.012500000186264515}, {&#34;device&#34;: &#34;a100&#34;, &#34;picoseconds&#34;: 2750000, &#34;source&#34;: &#34;fitted&#34;, &#34;spread&#34;: 0.10000000149011612}, {&#34;device&#34;: &#34;b200&#34;, &#34;picoseconds&#34;: 1, &#34;source&#34;: &#34;analytical&#34;}, {&#34;device&#34;: &#34;mi300x&#34;, &#34;picoseconds&#34;: 0, &#34;source&#34;: &#34;imported&#34;, &#34;samples&#34;: 1}]"
    flops 64
    bytes_read 128
    bytes_written 128
    attributes "{&#34;kind&#34;: &#34;gemm&#34;, &#34;transpose_a&#34;: true}"
  ]
  node [
    id 27
    label "@2 op.2"
    table "operation"
    block 0
    row 2
    kind "compute"
    name "op.2"
    phase "recompute"
    module "m"
    flops 64
    bytes_read 128
    bytes_written 128
    attributes "{&#34;kind&#34;: &#34;gemm&#34;, &#34;transpose_b&#34;: true}"
  ]
  node [
    id 28
    label "@3 op.3"
    table "operation"
    block 0
    row 3
    kind "compute"
    name "op.3"
    phase "optimizer"
    module "m"
    flops 64
    bytes_read 128
    bytes_written 128
    attributes "{&#34;kind&#34;: &#34;gemm&#34;, &#34;transpose_a&#34;: true, &#34;transpose_b&#34;: true}"
  ]
  node [
    id 29
    label "@4 op.4"
    table "operation"
    block 0
    row 4
    kind "compute"
    name "op.4"
    phase "other"
    module "m"
    flops 64
    bytes_read 128
    bytes_written 128
    attributes "{&#34;kind&#34;: &#34;attention&#34;, &#34;heads&#34;: 8, &#34;kv_heads&#34;: 2, &#34;head_dim&#34;: 64, &#34;causal&#34;: true, &#34;dropout&#34;: 0.1}"
  ]
  node [
    id 30
    label "@5 op.5"
    table "operation"
    block 0
    row 5
    kind "compute"
    name "op.5"
    phase "forward"
    module "m"
    flops 64
    bytes_read 128
    bytes_written "@5 op.5"
    table "operation"
    block 0
    row 5
    kind "compute"
    name "op.5"
    phase "forward"
    module "m"
    flops 64
    bytes_read 128
    bytes_written 128
    attributes "{&#34;kind&#34;: &#34;attention&#34;, &#34;heads&#34;: 1, &#34;kv_heads&#34;: 1, &#34;head_dim&#34;: 16}"
  ]
  node [
    id 31
    label "@6 op.6"
    table "operation"
    block 0
    row 6
    kind "compute"
    name "op.6"
    phase "backward"
    module "m"
    flops 64
    bytes_read 128
    bytes_written 128
    attributes "{&#34;kind&#34;: &#34;convolution&#34;, &#34;stride&#34;: [2, 1], &#34;padding&#34;: [1, 0], &#34;dilation&#34;: [1, 3], &#34;groups&#34;: 4, &#34;transposed&#34;: true}"
  ]
  node [
    id 32
    label "@7 op.7"
    table "operation"
    block 0
    row 7
    kind "compute"
    name "op.7"
    phase "recompute"
    module "m"
    flops 64
    bytes_read 128
    bytes_written 128
    attributes "{&#34;kind&#34;: &#34;convolution&#34;, &#34;stride&#34;: [1], &#34;padding&#34;: [0], &#34;dilation&#34;: [1]}"
  ]
  node [
    id 33
    label "@8 op.8"
    table "operation"
    block 0
    row 8
    kind "compute"
    name "op.8"
    phase "optimizer"
    module "m"
    flops 64
    bytes_read 128
    bytes_written 128
    attributes "{&#34;kind&#34;: &#34;multi_tensor&#34;, &#34;parts&#34;: 2, &#34;leads&#34;: true}"
  ]
  node [
    id 34
    label "@9 op.9"
    table "operation"
    block 0
    row 9
    kind "compute"
    name "op.9"
    phase "other"
    module "m"
    flops 64
    bytes_read 128
    bytes_written 128
    attributes "{&#34;kind&#34;: &#34;multi_tensor&#34;, &#34;parts&#34;: 2}"
  ]
  node [
    id 35
    label "@10 op.10"
    table "operation"
    block 0
    row 10
    kind "compute"
    name "op.10"
    phase "forward"
    module "m"
    flops 64
    bytes_read 128
    bytes_written 128
  ]
  node [
    id 36
    label "@11 all_reduce it"
    table "operation"
    block 0
    row 11
    kind "collective"
    name "all_reduce it"
    phase "backward"
    stream 1
    collective "all_reduce"
    group 0
    bytes_per_rank 128
    dtype "fp32"
    payload "parameter"
  ]
  node [
    id 37
    label "@12 all_gather it"
    table "operation"
    block 0
    row 12
    kind "collective"
    name "all_gather it"
    phase "backward"
    stream 1
    collective "all_gather"
    group 0
    bytes_per_rank 128
    dtype "fp16"
    payload "gradient"
    asynchronous 1
  ]
  node [
    id 38
    label "@13 reduce_scatter it"
    table "operation"
    block 0
    row 13
    kind "collective"
    name "reduce_scatter it"
    phase "backward"
    stream 1
    collective "reduce_scatter"
    group 0
    bytes_per_rank 128
    dtype "bf16"
    payload "activation"
  ]
  node [
    id 39
    label "@14 all_to_all it"
    table "operation"
    block 0
    row 14
    kind "collective"
    name "all_to_all it"
    phase "backward"
    stream 1
    collective "all_to_all"
    group 0
    bytes_per_rank 128
    dtype "fp64"
    payload "optimizer_state"
    asynchronous 1
  ]
  node [
    id 40
    label "@15 broadcast it"
    table "operation"
    block 0
    row 15
    kind "collective"
    name "broadcast it"
    phase "backward"
    stream 1
    collective "broadcast"
    group 0
    bytes_per_rank 128
    dtype "fp8_e4m3"
  ]
  node [
    id 41
    label "@16 reduce it"
    table "operation"
    block 0
    row 16
    kind "collective"
    name "reduce it"
    phase "backward"
    stream 1
    collective "reduce"
    group 0
    bytes_per_rank 128
    dtype "fp8_e5m2"
    payload "parameter"
    asynchronous 1
  ]
  node [
    id 42
    label "@17 gather it"
    table "operation"
    block 0
    row 17
    kind "collective"
    name "gather it"
    phase "backward"
    stream 1
    collective "gather"
    group 0
    bytes_per_rank 128
    dtype "int64"
    payload "gradient"
  ]
  node [
    id 43
    label "@18 scatter it"
    table "operation"
    block 0
    row 18
    kind "collective"
    name "scatter it"
    phase "backward"
    stream 1
    collective "scatter"
    group 0
    bytes_per_rank 128
    dtype "int32"
    payload "activation"
    asynchronous 1
  ]
  node [
    id 44
    label "@19 barrier it"
    table "operation"
    block 0
    row 19
    kind "collective"
    name "barrier it"
    phase "backward"
    stream 1
    collective "barrier"
    group 0
    bytes_per_rank 128
    dtype "int16"
    payload "optimizer_state"
  ]
  node [
    id 45
    label "@20 to next"
    table "operation"
    block 0
    row 20
    kind "send"
    name "to next"
    phase "other"
    stream 1
    group 0
    peer 1
    tag 7
    nbytes 128
    payload "gradient"
  ]
  node [
    id 46
    label "@21 from last"
    table "operation"
    block 0
    row 21
    kind "recv"
    name "from last"
    phase "other"
    stream 1
    group 0
    peer -1
    tag 7
    nbytes 128
  ]
  node [
    id 47
    label "@22 memcpy"
    table "operation"
    block 0
    row 22
    kind "copy"
    name "memcpy"
    phase "forward"
    direction "host_to_device"
    nbytes 96
  ]
  node [
    id 48
    label "@23 memcpy"
    table "operation"
    block 0
    row 23
    kind "copy"
    name "memcpy"
    phase "forward"
    direction "device_to_host"
    nbytes 96
  ]
  node [
    id 49
    label "@24 memcpy"
    table "operation"
    block 0
    row 24
    kind "copy"
    name "memcpy"
    phase "forward"
    direction "device_to_device"
    nbytes 96
  ]
  node [
    id 50
    label "@25 dataloader"
    table "operation"
    block 0
    row 25
    kind "host"
    name "dataloader"
    phase "other"
    stream 2
  ]
  edge [
    source 0
    target 25
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 26
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 27
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 28
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 29
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 30
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 31
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 32
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 33
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 34
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 35
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 36
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 37
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 38
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 39
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 40
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 41
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 42
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 43
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 44
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 0
    target 45
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 2
    target 47
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 2
    target 48
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 2
    target 49
    key 0
    kind "reads"
    position 0
  ]
  edge [
    source 25
    target 14
    key 0
    kind "makes"
    position 0
  ]
  edge [
    source 25
    target 36
    key 0
    kind "after"
    position 0
  ]
  edge [
    source 26
    target 15
    key 0
    kind "makes"
    position 0
  ]
  edge [
    source 26
    target 37
    key 0
    kind "after"
    position 0
  ]
  edge [
    source 27
    target 16
    key 0
    kind "makes"
    position 0
  ]
  edge [
    source 27
    target 38
    key 0
    kind "after"
    position 0
  ]
  edge [
    source 28
    target 17
    key 0
    kind "makes"
    position 0
  ]
  edge [
    source 28
    target 39
    key 0
    kind "after"
    position 0
  ]
  edge [
    source 29
    target 18
    key 0
    kind "makes"
    position 0
  ]
  edge [
    source 29
    target 40
    key 0
    kind "after"
    position 0
  ]
  edge [
    source 30
    target 19
    key 0
    kind "makes"
    position 0
  ]
  edge [
    source 30
    target 41
    key 0
    kind "after"
    position 0
  ]
  edge [
    source 31
    target 20
    key 0
    kind "makes"
    position 0
  ]
  edge [
    source 31
    target 42
    key 0
    kind "after"
    position 0
  ]
  edge [
    source 32
    target 21
    key 0
    kind "makes"
    position 0
  ]
  edge [
    source 32
    target 43
    key 0
    kind "after"
    position 0
  ]
  edge [
    source 33
    target 22
    key 0
    kind "makes"
    position 0
  ]
  edge [
    source 33
    target 44
    key 0
    kind "after"
    position 0
  ]
  edge [
    source 34
    target 23
    key 0
    kind "makes"
    position 0
  ]
  edge [
    source 35
    target 24
    key 0
    kind "makes"
    position 0
  ]
  edge [
    source 46
    target 1
    key 0
    kind "makes"
    position 0
  ]
  edge [
    source 50
    target 3
    key 0
    kind "makes"
    position 0
  ]
]
