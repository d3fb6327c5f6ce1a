// out = x dequantised(weight)^T for 2 to 32 rows of x: each weight is read and dequantised once for all rows.
//
// Transposed, so that weights are the left operand: out^T [8 outputs x 8 rows] += W [8 x 8] X^T [8 x 8]. A lane
// loads 16 bytes of codes of one output (128 / BITS neighbouring inputs), a quad of them 64 contiguous bytes,
// and spreads them over 64 / BITS fragments. X is staged in the same order in threadgroup memory.
//
// Template  T float16, bfloat16 or float32; BITS 4 or 8; GROUP 32, 64 or 128 inputs per scale; TILES of 8 rows;
//           OUTPUT_TILES of 8 outputs and SPLITS of the inputs: one simdgroup for each pair, at most 8
// Inputs    x [M, K] T; weight [N, K BITS / 32] uint32; scales, biases [N, K / GROUP] T, as mx.quantize makes them
//           dims int32: M, N, K, padded to 8 elements; K is a multiple of GROUP
// Output    out [M, N] T
// Grid      (32 OUTPUT_TILES SPLITS ceil(N / (8 OUTPUT_TILES)), 1, 1) threads,
//           threadgroups of 32 OUTPUT_TILES SPLITS

//@body
  constexpr int CODES = 128 / BITS;   // of a 16-byte load
  constexpr int STEP = 4 * CODES;     // inputs that a simdgroup takes at a time
  constexpr int PIECE = 16 / sizeof(T);
  constexpr int X_PIECES = CODES / PIECE;
  constexpr uint MASK = (1 << BITS) - 1;

  const uint lane = thread_index_in_simdgroup;
  const int simdgroup = simdgroup_index_in_threadgroup;
  const int frow = fragment_row(lane);
  const int fcol = fragment_col(lane);
  const int num_rows = dims[0], num_outputs = dims[1], num_inputs = dims[2];
  const int output_tile = simdgroup % OUTPUT_TILES, split = simdgroup / OUTPUT_TILES;
  const int output = 8 * (OUTPUT_TILES * int(threadgroup_position_in_grid.x) + output_tile) + frow;
  const device uint* codes = weight + long(output) * (num_inputs / 32 * BITS);

  // Lanes of a quad that share a scale get it from the first of them. Lane bits 0 and 3 number the quad.
  const ushort scale_lane = lane & ~uint((GROUP > CODES) | (GROUP > 2 * CODES) << 3);

  threadgroup uint4 x_pieces[SPLITS][TILES][X_PIECES][32];
  float2 acc[TILES];
  UNROLL for (int tile = 0; tile < TILES; tile++) {
    acc[tile] = 0;
  }
  for (int start = 0; start < num_inputs; start += STEP * SPLITS) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // nobody still reads the inputs staged before
    for (int at = thread_index_in_threadgroup; at < SPLITS * TILES * X_PIECES * 32;
         at += 32 * OUTPUT_TILES * SPLITS) {
      const int reader = at % 32, piece = at / 32 % X_PIECES, tile = at / (32 * X_PIECES) % TILES;
      const int part = at / (32 * X_PIECES * TILES);
      const int row = 8 * tile + fragment_col(reader);
      const int input = start + part * STEP + fragment_row(reader) / 2 * CODES + piece * PIECE + fragment_row(reader) % 2;
      const device T* source = x + long(row) * num_inputs + input;
      x_pieces[part][tile][piece][reader] = interleave(
          source, source + num_inputs, input < num_inputs && row < num_rows,
          input < num_inputs && row + 1 < num_rows);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const int input = start + split * STEP + fcol / 2 * CODES;
    const bool valid = output < num_outputs && input < num_inputs;
    uint4 bits = 0;
    if (valid) {
      bits = *reinterpret_cast<const device uint4*>(codes + input / 32 * BITS + input % 32 * BITS / 32);
    }
    float2 scale_bias = 0;
    if (valid && scale_lane == lane) {
      const long group = long(output) * (num_inputs / GROUP) + input / GROUP;
      scale_bias = float2(float(scales[group]), float(biases[group]));
    }
    scale_bias = simd_shuffle(scale_bias, scale_lane);

    UNROLL for (int piece = 0; piece < X_PIECES; piece++) {
      Piece<T> row[TILES];
      UNROLL for (int tile = 0; tile < TILES; tile++) {
        row[tile].unpack(x_pieces[split][tile][piece][lane]);
      }
      UNROLL for (int i = 0; i < PIECE / 2; i++) {
        const int first_bit = (piece * PIECE + 2 * i) * BITS;
        const uint word = bits[first_bit / 32] >> (first_bit % 32);
        const float2 code = float2(word & MASK, word >> BITS & MASK);
        const float2 pair = valid ? code * scale_bias.x + scale_bias.y : 0;
        UNROLL for (int tile = 0; tile < TILES; tile++) {
          multiply_add(acc[tile], pair, row[tile].pair[i]);
        }
      }
    }
  }

  threadgroup float2 split_sums[SPLITS][OUTPUT_TILES][TILES][32];
  if (SPLITS > 1) {
    UNROLL for (int tile = 0; tile < TILES; tile++) {
      split_sums[split][output_tile][tile][lane] = acc[tile];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (split > 0) {
      return;
    }
    UNROLL for (int tile = 0; tile < TILES; tile++) {
      acc[tile] = 0;
      UNROLL for (int s = 0; s < SPLITS; s++) {
        acc[tile] += split_sums[s][output_tile][tile][lane];
      }
    }
  }
  UNROLL for (int tile = 0; tile < TILES; tile++) {
    UNROLL for (int c = 0; c < 2; c++) {
      const int row = 8 * tile + fcol + c;
      if (row < num_rows && output < num_outputs) {
        out[long(row) * num_outputs + output] = T(acc[tile][c]);
      }
    }
  }
