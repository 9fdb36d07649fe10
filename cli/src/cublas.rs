//! Multiplies matrices with cuBLAS, loaded at run time, as compute work beside collectives.

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;

use crate::error::{Failure, Result};
use crate::library::{LibrarySpec, functions};

/// The file names and folders by which cuBLAS is found.
pub(crate) const LIBRARY: LibrarySpec = LibrarySpec {
    name: "cuBLAS",
    option: "--cublas",
    variables: &["CUDA_HOME", "CUDA_PATH"],
    files: &["libcublas.so.13", "libcublas.so.12"],
    packages: &["nvidia/cu13/lib", "nvidia/cublas/lib"],
    advice: "pip install nvidia-cublas, or a CUDA toolkit",
};

/// The file names and folders by which cuBLASLt is found, on which cuBLAS depends. Packages keep it
/// in the same folder, which the loader does not search.
const LIGHT: LibrarySpec =
    LibrarySpec { name: "cuBLASLt", files: &["libcublasLt.so.13", "libcublasLt.so.12"], ..LIBRARY };

/// The value of `CUBLAS_OP_N`, with which cuBLAS does not transpose a matrix.
const AS_IT_IS: c_int = 0;
/// The value of `CUDA_R_16BF`, the data type bfloat16.
const BF16: c_int = 14;
/// The value of `CUBLAS_COMPUTE_32F`, with which cuBLAS computes in 32-bit floating point.
const COMPUTE_F32: c_int = 68;
/// The value of `CUBLAS_GEMM_DEFAULT`, with which cuBLAS selects the algorithm.
const ALGORITHM_DEFAULT: c_int = -1;

/// The opaque C structure `cublasContext`.
#[repr(C)]
pub(crate) struct Context {
    _opaque: [u8; 0],
}

functions! {
    struct Functions {
        create = "cublasCreate_v2" (*mut *mut Context) -> c_int;
        destroy = "cublasDestroy_v2" (*mut Context) -> c_int;
        set_stream = "cublasSetStream_v2" (*mut Context, *mut c_void) -> c_int;
        set_workspace = "cublasSetWorkspace_v2" (*mut Context, *mut c_void, usize) -> c_int;
        gemm = "cublasGemmEx" (
            *mut Context, c_int, c_int, c_int, c_int, c_int,
            *const c_void, *const c_void, c_int, c_int, *const c_void, c_int, c_int,
            *const c_void, *mut c_void, c_int, c_int, c_int, c_int
        ) -> c_int;
    }
}

/// A cuBLAS handle that enqueues matrix products on one stream.
pub(crate) struct Cublas {
    functions: Functions,
    context: *mut Context,
    path: String,
}

/// Matrices of bf16 elements in device memory, row by row: `left` has `rows` × `inner` elements,
/// `right` has `inner` × `columns`, and `product` has `rows` × `columns`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrices {
    pub(crate) rows: c_int,
    pub(crate) inner: c_int,
    pub(crate) columns: c_int,
    pub(crate) left: u64,
    pub(crate) right: u64,
    pub(crate) product: u64,
}

impl Cublas {
    /// Loads cuBLAS from `given` or from the usual folders, and creates a handle for the current
    /// GPU.
    pub(crate) fn open(given: Option<&Path>) -> Result<Self> {
        // cuBLAS finds cuBLASLt by its name if it is already loaded. If it is not found here, the
        // loader may still find it; otherwise the loader reports the error.
        let beside =
            given.and_then(|given| if given.is_dir() { Some(given) } else { given.parent() });
        if let Ok(light) = LIGHT.open(beside) {
            // It must stay loaded: dropping the handle would unload it.
            std::mem::forget(light.library);
        }
        let found = LIBRARY.open(given)?;
        let path = found.path;
        let functions = Functions::look_up(found.library).map_err(|symbol| {
            Failure::failed(format!(
                "cuBLAS at {path} has no function {symbol}, expected cuBLAS 12 or newer"
            ))
            .with_advice("give a newer file with --cublas")
        })?;
        let mut cublas = Self { functions, context: null_mut(), path };
        // SAFETY: the pointer points to `cublas.context`, which outlives the call.
        let code = unsafe { (cublas.functions.create)(&mut cublas.context) };
        cublas.check("cublasCreate", code)?;
        Ok(cublas)
    }

    /// Makes all later matrix products run on `stream` with the caller's workspace.
    ///
    /// # Safety
    /// The stream belongs to the GPU that was current when this handle was opened. Stream and
    /// workspace outlive the last product.
    pub(crate) unsafe fn run_on(
        &self,
        stream: *mut c_void,
        workspace: u64,
        workspace_bytes: usize,
    ) -> Result<()> {
        // SAFETY: the context was created by `open`; the caller guarantees the stream.
        let code = unsafe { (self.functions.set_stream)(self.context, stream) };
        self.check("cublasSetStream", code)?;
        let workspace = workspace as *mut c_void;
        // SAFETY: the context was created by `open`; the caller guarantees the workspace.
        let code =
            unsafe { (self.functions.set_workspace)(self.context, workspace, workspace_bytes) };
        self.check("cublasSetWorkspace", code)
    }

    /// Enqueues one matrix product on the stream.
    ///
    /// # Safety
    /// The matrices are device memory of the given size and stay allocated until the stream has
    /// completed the product.
    pub(crate) unsafe fn multiply(&self, matrices: Matrices) -> Result<()> {
        let Matrices { rows, inner, columns, left, right, product } = matrices;
        let (one, zero) = (1f32, 0f32);
        let (one, zero) = (std::ptr::from_ref(&one).cast(), std::ptr::from_ref(&zero).cast());
        let (left, right) = (left as *const c_void, right as *const c_void);
        let product = product as *mut c_void;
        // cuBLAS takes matrices column by column, which are the transposed ones, so the factors change
        // places.
        // SAFETY: cuBLAS reads the scaling factors before the call returns; the caller guarantees the
        // matrices.
        let code = unsafe {
            (self.functions.gemm)(
                self.context,
                AS_IT_IS,
                AS_IT_IS,
                columns,
                rows,
                inner,
                one,
                right,
                BF16,
                columns,
                left,
                BF16,
                inner,
                zero,
                product,
                BF16,
                columns,
                COMPUTE_F32,
                ALGORITHM_DEFAULT,
            )
        };
        self.check("cublasGemmEx", code)
    }

    fn check(&self, call: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        Err(Failure::failed(format!("cuBLAS at {}: {call} returned status {code}", self.path))
            .with_advice("look up this cublasStatus_t in the documentation of cuBLAS"))
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        if !self.context.is_null() {
            // SAFETY: the context was created by `open`, and the owner waits for all products before
            // the drop. An error at this point has no remedy.
            unsafe { (self.functions.destroy)(self.context) };
        }
    }
}
