//! Multiplies matrices with cuBLAS, and with the processor for the comparison.

use std::error::Error;

use cudarc::cublas::sys::cublasOperation_t::CUBLAS_OP_N;
use cudarc::cublas::{CudaBlas, Gemm as _, GemmConfig};

use crate::arena::Part;

/// Multiplies matrices whose rows are contiguous.
pub fn multiply(
    blas: &CudaBlas,
    (rows, inner, columns): (usize, usize, usize),
    left: &Part,
    right: &Part,
    product: &mut Part,
) -> Result<(), Box<dyn Error>> {
    // cuBLAS stores columns contiguously, and so sees transposed matrices.
    let config = GemmConfig {
        transa: CUBLAS_OP_N,
        transb: CUBLAS_OP_N,
        m: columns as i32,
        n: rows as i32,
        k: inner as i32,
        alpha: 1.0,
        lda: columns as i32,
        ldb: inner as i32,
        beta: 0.0,
        ldc: columns as i32,
    };
    // SAFETY: the matrices have these sizes.
    Ok(unsafe { blas.gemm(config, &*right.slice, &*left.slice, &mut *product.slice) }?)
}

/// Multiplies matrices on the processor.
pub fn product(
    (rows, inner, columns): (usize, usize, usize),
    left: &[f32],
    right: &[f32],
) -> Vec<f32> {
    let element = |at: usize| {
        let (row, column) = (at / columns, at % columns);
        (0..inner).map(|k| left[row * inner + k] * right[k * columns + column]).sum()
    };
    (0..rows * columns).map(element).collect()
}

/// Returns small whole numbers, of which `f32` computes exact sums in any order.
pub fn values(seed: usize, len: usize) -> Vec<f32> {
    (0..len).map(|at| ((at * 31 + seed * 17) % 7) as f32 - 3.0).collect()
}
