//! A stand-in for cuBLAS on the simulated driver, for tests of the program.
//!
//! It has the C symbols that the program looks up and checks their arguments. Small matrices are
//! multiplied on the host, in the order of the stream. Instead of the product of large ones it keeps
//! the stream busy for some time.

#![allow(
    missing_docs,
    missing_debug_implementations,
    clippy::missing_safety_doc,
    reason = "these are the vendor's functions; its header documents them"
)]

use std::ffi::{c_int, c_void};

use half::bf16;
use libloading::Library;

const SUCCESS: c_int = 0;
const NOT_INITIALIZED: c_int = 1;
const INVALID_VALUE: c_int = 7;
const EXECUTION_FAILED: c_int = 13;

/// Sides of matrices that are not multiplied.
const LARGE_SIDE: c_int = 8192;
/// Multiplications of elements in a product that is computed.
const MULTIPLICATIONS_MAX: u64 = 1 << 24;

/// Bytes that a product of large matrices sets.
const BUSY_BYTES: usize = 2 << 20;

pub struct Context {
    driver: Library,
    stream: *mut c_void,
    has_workspace: bool,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasCreate_v2(context: *mut *mut Context) -> c_int {
    // SAFETY: the simulated driver is made to be loaded, and is already loaded.
    let Ok(driver) = (unsafe { Library::new("libcuda.so.1") }) else { return NOT_INITIALIZED };
    let made = Context { driver, stream: std::ptr::null_mut(), has_workspace: false };
    // SAFETY: the caller passes a valid pointer for the context.
    unsafe { context.write(Box::into_raw(Box::new(made))) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasDestroy_v2(context: *mut Context) -> c_int {
    // SAFETY: the caller passes a context of `cublasCreate_v2`.
    drop(unsafe { Box::from_raw(context) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasSetStream_v2(context: *mut Context, stream: *mut c_void) -> c_int {
    // SAFETY: the caller passes a context of `cublasCreate_v2`, and no other reference exists.
    let context = unsafe { &mut *context };
    context.stream = stream;
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasSetWorkspace_v2(
    context: *mut Context,
    workspace: *mut c_void,
    bytes: usize,
) -> c_int {
    // SAFETY: as for the stream.
    let context = unsafe { &mut *context };
    context.has_workspace = !workspace.is_null() && bytes > 0;
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cublasGemmEx(
    context: *mut Context,
    transpose_left: c_int,
    transpose_right: c_int,
    rows: c_int,
    columns: c_int,
    depth: c_int,
    alpha: *const f32,
    left: u64,
    left_type: c_int,
    left_stride: c_int,
    right: u64,
    right_type: c_int,
    right_stride: c_int,
    beta: *const f32,
    product: u64,
    product_type: c_int,
    product_stride: c_int,
    compute: c_int,
    algorithm: c_int,
) -> c_int {
    // SAFETY: as for the stream.
    let context = unsafe { &*context };
    // SAFETY: the caller passes a valid pointer to a factor.
    let alpha = unsafe { alpha.read() };
    // SAFETY: the caller passes a valid pointer to a factor.
    let beta = unsafe { beta.read() };
    let right_in_all = context.has_workspace
        && !context.stream.is_null()
        && (alpha, beta) == (1.0, 0.0)
        && [transpose_left, transpose_right] == [0, 0]
        && [rows, columns, depth].iter().all(|side| *side > 0)
        && [left_stride, right_stride, product_stride] == [rows, depth, rows]
        && [left_type, right_type, product_type] == [14; 3]
        && [left, right, product].iter().all(|address| *address != 0)
        && (compute, algorithm) == (68, -1);
    if !right_in_all {
        return INVALID_VALUE;
    }
    let sides = [rows, columns, depth];
    if sides != [LARGE_SIDE; 3] {
        let sides = sides.map(|side| side.unsigned_abs() as usize);
        return context.enqueue(Product { sides, left, right, product });
    }
    type Set = unsafe extern "C" fn(u64, u8, usize, *mut c_void) -> c_int;
    // SAFETY: this is the type of the symbol in the driver's header.
    let Ok(set) = (unsafe { context.driver.get::<Set>("cuMemsetD8Async") }) else {
        return NOT_INITIALIZED;
    };
    // SAFETY: the product is larger than these bytes, and stays allocated until the stream has
    // completed the call.
    match unsafe { set(product, 1, BUSY_BYTES, context.stream) } {
        0 => SUCCESS,
        _ => EXECUTION_FAILED,
    }
}

/// A product that a stream computes, of matrices in device memory, column by column.
struct Product {
    /// Rows and columns of the product, and the inner dimension.
    sides: [usize; 3],
    left: u64,
    right: u64,
    product: u64,
}

impl Context {
    /// Has the stream compute a product behind the work that it holds.
    fn enqueue(&self, product: Product) -> c_int {
        if product.sides.iter().map(|side| *side as u64).product::<u64>() > MULTIPLICATIONS_MAX {
            return INVALID_VALUE;
        }
        type Call = unsafe extern "C" fn(*mut c_void, Compute, *mut c_void) -> c_int;
        // SAFETY: this is the type of the symbol in the driver's header.
        let Ok(call) = (unsafe { self.driver.get::<Call>("cuLaunchHostFunc") }) else {
            return NOT_INITIALIZED;
        };

        let data = Box::into_raw(Box::new(product));
        // SAFETY: the function takes the box back, and runs once.
        match unsafe { call(self.stream, compute, data.cast()) } {
            0 => SUCCESS,
            _ => EXECUTION_FAILED,
        }
    }
}

type Compute = unsafe extern "C" fn(*mut c_void);

/// Computes a product in 32-bit floating point, and rounds its elements.
unsafe extern "C" fn compute(data: *mut c_void) {
    // SAFETY: `enqueue` passes a box of this type to one call.
    let job = unsafe { Box::from_raw(data.cast::<Product>()) };
    let [rows, columns, depth] = job.sides;
    let factor = |address: u64, length| {
        // SAFETY: device memory of the simulated driver is mapped, and the caller of the product keeps
        // a matrix of this length there until the stream has computed it.
        unsafe { std::slice::from_raw_parts(address as *const bf16, length) }
    };
    let (left, right) = (factor(job.left, rows * depth), factor(job.right, depth * columns));

    // SAFETY: the product has this many elements and is kept as the factors are.
    let product =
        unsafe { std::slice::from_raw_parts_mut(job.product as *mut bf16, rows * columns) };

    for column in 0..columns {
        for row in 0..rows {
            let terms = (0..depth)
                .map(|k| left[row + k * rows].to_f32() * right[k + column * depth].to_f32());
            product[row + column * rows] = bf16::from_f32(terms.sum());
        }
    }
}
