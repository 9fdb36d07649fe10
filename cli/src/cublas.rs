//! A matrix product through cuBLAS, loaded at run time: the compute that gathers run beside.

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;

use crate::error::{Failure, Result};
use crate::library::{LibrarySpec, functions};

/// Where cuBLAS is looked for.
pub(crate) const LIBRARY: LibrarySpec = LibrarySpec {
    name: "cuBLAS",
    option: "--cublas",
    variables: &["CUDA_HOME", "CUDA_PATH"],
    files: &["libcublas.so.13", "libcublas.so.12"],
    packages: &["nvidia/cu13/lib", "nvidia/cublas/lib"],
    advice: "pip install nvidia-cublas, or a CUDA toolkit",
};

/// What cuBLAS itself needs; packages keep it in the same folder, which the loader does not search.
const LIGHT: LibrarySpec =
    LibrarySpec { name: "cuBLASLt", files: &["libcublasLt.so.13", "libcublasLt.so.12"], ..LIBRARY };

/// `CUBLAS_OP_N`.
const AS_IT_IS: c_int = 0;
/// `CUDA_R_16BF`.
const BF16: c_int = 14;
/// `CUBLAS_COMPUTE_32F`.
const COMPUTE_F32: c_int = 68;
/// `CUBLAS_GEMM_DEFAULT`.
const ALGORITHM_DEFAULT: c_int = -1;

/// `cublasContext`, opaque.
#[repr(C)]
pub(crate) struct Context {
    _opaque: [u8; 0],
}

functions! {
    /// cuBLAS's functions.
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

/// cuBLAS on one stream.
pub(crate) struct Cublas {
    functions: Functions,
    context: *mut Context,
    path: String,
}

/// Square bf16 matrices in device memory, `side` × `side` each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrices {
    pub(crate) side: c_int,
    pub(crate) left: u64,
    pub(crate) right: u64,
    pub(crate) product: u64,
}

impl Cublas {
    /// Loads the library from `given` or from the usual places; the GPU is the one that is current.
    ///
    /// # Errors
    /// If it is not there, or cannot start.
    pub(crate) fn open(given: Option<&Path>) -> Result<Self> {
        // Loaded first, it is found by its name when cuBLAS asks for it. Where it is not found, the
        // loader may still find it for cuBLAS, or else says so.
        let beside =
            given.and_then(|given| if given.is_dir() { Some(given) } else { given.parent() });
        if let Ok(light) = LIGHT.open(beside) {
            // It stays: closed, it would be gone again.
            std::mem::forget(light.library);
        }
        let found = LIBRARY.open(given)?;
        let path = found.path;
        let functions = Functions::look_up(found.library).map_err(|symbol| {
            Failure::failed(format!("cuBLAS at {path} has no {symbol}"))
                .with_advice("name another with --cublas")
        })?;
        let mut cublas = Self { functions, context: null_mut(), path };
        // SAFETY: the pointer is to a pointer that lives.
        let code = unsafe { (cublas.functions.create)(&mut cublas.context) };
        cublas.check("cublasCreate", code)?;
        Ok(cublas)
    }

    /// Runs everything from now on on `stream`, in a workspace of the caller's.
    ///
    /// # Errors
    /// That of cuBLAS.
    ///
    /// # Safety
    /// The stream is of the GPU that was current when this was opened; stream and workspace outlive
    /// the last product.
    pub(crate) unsafe fn run_on(
        &self,
        stream: *mut c_void,
        workspace: u64,
        workspace_bytes: usize,
    ) -> Result<()> {
        // SAFETY: the context lives; the stream is the caller's promise.
        let code = unsafe { (self.functions.set_stream)(self.context, stream) };
        self.check("cublasSetStream", code)?;
        let workspace = workspace as *mut c_void;
        // SAFETY: as above.
        let code =
            unsafe { (self.functions.set_workspace)(self.context, workspace, workspace_bytes) };
        self.check("cublasSetWorkspace", code)
    }

    /// Puts a product on the stream.
    ///
    /// # Errors
    /// That of cuBLAS.
    ///
    /// # Safety
    /// The matrices are device memory of that size and live until the stream has passed the product.
    pub(crate) unsafe fn multiply(&self, matrices: Matrices) -> Result<()> {
        let Matrices { side, left, right, product } = matrices;
        let (one, zero) = (1f32, 0f32);
        let (one, zero) = (std::ptr::from_ref(&one).cast(), std::ptr::from_ref(&zero).cast());
        let (left, right) = (left as *const c_void, right as *const c_void);
        let product = product as *mut c_void;
        // SAFETY: the factors are read before the call returns; the rest is the caller's promise.
        let code = unsafe {
            (self.functions.gemm)(
                self.context,
                AS_IT_IS,
                AS_IT_IS,
                side,
                side,
                side,
                one,
                left,
                BF16,
                side,
                right,
                BF16,
                side,
                zero,
                product,
                BF16,
                side,
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
        Err(Failure::failed(format!("cuBLAS at {}: {call} gives status {code}", self.path))
            .with_advice("see cublasStatus_t in NVIDIA's documentation"))
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        if !self.context.is_null() {
            // SAFETY: it was created, and nothing is under way: products are waited for before.
            // A refusal leaves nothing to do.
            unsafe { (self.functions.destroy)(self.context) };
        }
    }
}
