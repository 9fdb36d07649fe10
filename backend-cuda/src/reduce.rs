//! Runs reductions with the kernels of `kernels/reduce.cu`.
//!
//! The driver compiles their PTX for its device when the first operation with a reduction is
//! prepared, and caches the result. Neither nvcc nor the CUDA runtime library is needed.

use std::ffi::{CStr, CString, c_void};

use peerlane_hal::{DType, ElementKind, Operator, Reducer, Reduction};
use peerlane_toolkit::device::{DevicePtr, ReduceCalls, StreamHandle};

use crate::device::Context;
use crate::error::{CudaResult, Error};
use crate::sys::{self, CUfunction, CUmodule};

const PTX: &str = include_str!("../kernels/reduce.ptx");

/// As in `kernels/reduce.cu`.
const SOURCES_MAX: usize = 128;
pub(crate) const THREADS: u32 = 512;

/// The types that have kernels, in the order of [`Kernels::functions`].
const TYPES: [DType; 8] = [
    DType::U8,
    DType::U16,
    DType::U32,
    DType::U64,
    DType::F16,
    DType::Bf16,
    DType::F32,
    DType::F64,
];

/// The results of a driver that refuses code: an invalid image, no code for the device, invalid
/// PTX, no compiler, PTX of another version, no compilation, and an invalid source.
const REFUSALS: [sys::CUresult; 7] = [200, 209, 218, 221, 222, 223, 300];

/// The kernels for reductions in one context. They stay loaded as long as the context lives,
/// because unloading may wait for streams that wait for peers.
#[derive(Debug)]
pub(crate) struct Kernels {
    /// For each type the kernels of [`OPERATORS`]; null where a type has none.
    functions: [[CUfunction; OPERATORS.len()]; TYPES.len()],
}

/// The parameter of a kernel that holds the addresses of the sources.
#[repr(C)]
struct Sources([DevicePtr; SOURCES_MAX]);

/// How a reduction is done with a kernel for another type.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Recipe {
    /// The index of the type in [`TYPES`], and that of the operator in [`OPERATORS`].
    pub(crate) kernel: (usize, usize),
    /// The mask that the kernel applies to all words, by an exclusive or, when it loads and stores
    /// them.
    pub(crate) flip: u64,
    pub(crate) divides: bool,
}

impl Recipe {
    pub(crate) fn new(reduction: Reduction) -> Self {
        let (operator, dtype) = (reduction.operator(), reduction.dtype());
        let is_signed = dtype.kind() == ElementKind::Signed;
        // Signed integers use the kernel of the unsigned ones of their size.
        let has_kernel = |kernel: &DType| match is_signed {
            true => kernel.kind() == ElementKind::Unsigned && kernel.bytes() == dtype.bytes(),
            false => *kernel == dtype,
        };
        let of_type = TYPES.iter().position(has_kernel);
        let of_type = of_type.expect("a kernel for every type that `Reduction::new` accepts");

        // The sign bit of each element in a word.
        let bits = 8 * dtype.bytes();
        let sign =
            (0..u64::BITS as usize / bits).fold(0, |sign, at| sign | 1 << (bits * (at + 1) - 1));

        // The kernels find only the largest value, and compare integers as unsigned. A flipped sign
        // bit gives signed integers that order, and negates floats. The complement reverses the
        // order of integers.
        let order = if is_signed { sign } else { 0 };
        let flip = match operator {
            Operator::Max | Operator::Maximum => order,
            Operator::Min | Operator::Minimum if dtype.is_float() => sign,
            Operator::Min | Operator::Minimum => !order,
            Operator::Sum | Operator::Average => 0,
            #[cfg(not(peerlane_workspace))]
            _ => 0,
        };

        let of_operator = match operator {
            Operator::Sum | Operator::Average => SUM,
            Operator::Maximum | Operator::Minimum if dtype.is_float() => MAXIMUM,
            _ => MAX,
        };
        let divides = operator == Operator::Average;
        Self { kernel: (of_type, of_operator), flip, divides }
    }
}

impl Kernels {
    /// Loads the kernels into the context, which is current.
    fn load(context: &Context) -> Result<Self, Error> {
        let module = load_module(context, PTX, "reductions")?;

        let mut kernels =
            Self { functions: [[std::ptr::null_mut(); OPERATORS.len()]; TYPES.len()] };
        for (of_type, of_operator, name) in kernel_names() {
            let function = find_kernel(context, module, &format!("reduce_{name}"))?;
            kernels.functions[of_type][of_operator] = function;
        }
        Ok(kernels)
    }
}

/// The operators that have kernels, in the order of [`Kernels::functions`]. Integers have no
/// `maximum`, as it is `max` for them.
const OPERATORS: [&str; 3] = ["sum", "max", "maximum"];
const SUM: usize = 0;
const MAX: usize = 1;
const MAXIMUM: usize = 2;

/// Returns the part of a kernel's name that says what it reduces.
pub(crate) fn kernel_name((of_type, of_operator): (usize, usize)) -> String {
    format!("{}_{}", OPERATORS[of_operator], TYPES[of_type])
}

/// Returns the indexes of all kernels in [`TYPES`] and [`OPERATORS`], with their names.
pub(crate) fn kernel_names() -> impl Iterator<Item = (usize, usize, String)> {
    let has_kernel =
        |of_type: usize, of_operator| of_operator != MAXIMUM || TYPES[of_type].is_float();
    let pairs =
        (0..TYPES.len()).flat_map(|of_type| (0..OPERATORS.len()).map(move |op| (of_type, op)));
    pairs
        .filter(move |(of_type, of_operator)| has_kernel(*of_type, *of_operator))
        .map(|kernel| (kernel.0, kernel.1, kernel_name(kernel)))
}

/// Has the driver compile the PTX of kernels, which are for `purpose`, in the current context.
pub(crate) fn load_module(context: &Context, ptx: &str, purpose: &str) -> Result<CUmodule, Error> {
    let driver = context.driver;
    let load = context.require("cuModuleLoadDataEx", driver.module_load_data_ex)?;
    // Checked here, so that the first launch cannot fail for it.
    context.require("cuLaunchKernel", driver.launch_kernel)?;

    let ptx = CString::new(ptx).expect("the text has no zero");
    let mut module = std::ptr::null_mut();
    let mut log = [0_u8; 2048];
    let mut options = [sys::JIT_ERROR_LOG_BUFFER, sys::JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
    let mut values = [log.as_mut_ptr().cast(), log.len() as *mut c_void];
    let count = options.len() as u32;
    let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
    // SAFETY: the text ends with a zero; the arrays hold as many options as values; the results are
    // stored in locals.
    let code = unsafe { load(&raw mut module, ptx.as_ptr().cast(), count, options, values) };
    // Such an error is not a fault, and its text says what the driver needs.
    if REFUSALS.contains(&code) {
        return Err(refused(context, purpose, code, &log));
    }

    context.check("cuModuleLoadDataEx", code)?;
    Ok(module)
}

/// Finds a kernel in a module of the current context.
pub(crate) fn find_kernel(
    context: &Context,
    module: CUmodule,
    name: &str,
) -> Result<CUfunction, Error> {
    let find = context.require("cuModuleGetFunction", context.driver.module_get_function)?;
    let name = CString::new(name).expect("the name has no zero");
    let mut function = std::ptr::null_mut();
    // SAFETY: the module is loaded; the result is stored in a local.
    let code = unsafe { find(&raw mut function, module, name.as_ptr()) };
    context.check("cuModuleGetFunction", code)?;
    Ok(function)
}

#[cold]
fn refused(context: &Context, purpose: &str, code: sys::CUresult, log: &[u8]) -> Error {
    let result = CudaResult::query(context.driver, code);
    let log = CStr::from_bytes_until_nul(log).unwrap_or_default().to_string_lossy();
    let reason = if log.trim().is_empty() { String::new() } else { format!(" ({})", log.trim()) };

    let text = format!(
        "the driver does not accept the kernels for {purpose} on {}: {result}{reason}; they need \
         a device of compute capability 7.0 or newer, and this driver needs its PTX compiler \
         (libnvidia-ptxjitcompiler.so.1)",
        context.label()
    );
    Error::Unavailable { text, result: Some(result) }
}

// SAFETY: the kernels read `count` elements of each source and write as many to the target, in the
// order of the stream. The reducer names the length of `Sources` as the largest number.
unsafe impl ReduceCalls for Context {
    fn prepare_reduce(&self) -> Result<Option<Reducer>, Error> {
        if self.kernels.get().is_none() {
            let kernels = Kernels::load(self)?;
            self.kernels.get_or_init(|| kernels);
        }

        let blocks = self.info.multiprocessors.max(1);
        Ok(Some(Reducer { sources_max: SOURCES_MAX, blocks, threads: THREADS }))
    }

    unsafe fn reduce(
        &self,
        stream: StreamHandle,
        to: DevicePtr,
        from: &[DevicePtr],
        bytes: u64,
        reduction: Reduction,
        blocks: u32,
    ) -> Result<(), Error> {
        let launch = self.require("cuLaunchKernel", self.driver.launch_kernel)?;
        let Some(kernels) = self.kernels.get() else {
            return Err(Error::unavailable("the kernels for reductions are not loaded"));
        };

        let Recipe { kernel: (of_type, of_operator), flip, divides } = Recipe::new(reduction);
        let mut sources = Sources([0; SOURCES_MAX]);
        sources.0[..from.len()].copy_from_slice(from);
        let number = from.len() as u32;
        let divisor = if divides { number } else { 1 };
        let count = bytes / reduction.dtype().bytes() as u64;

        let mut parameters = [
            (&raw const to).cast_mut().cast::<c_void>(),
            (&raw const sources).cast_mut().cast(),
            (&raw const number).cast_mut().cast(),
            (&raw const divisor).cast_mut().cast(),
            (&raw const flip).cast_mut().cast(),
            (&raw const count).cast_mut().cast(),
        ];

        // More blocks would leave threads without a vector of 16 bytes.
        let needed = bytes.div_ceil(16 * u64::from(THREADS)).max(1);
        let blocks = u32::try_from(needed).unwrap_or(u32::MAX).min(blocks);

        let function = kernels.functions[of_type][of_operator];
        let (parameters, none) = (parameters.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: the parameters are those of the kernel, and the driver copies them. The caller
        // vouches for the stream and the spans.
        let code =
            unsafe { launch(function, blocks, 1, 1, THREADS, 1, 1, 0, stream.0, parameters, none) };
        self.check("cuLaunchKernel", code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(operator: Operator, dtype: DType) -> (DType, usize, u64, bool) {
        let reduction = Reduction::new(operator, dtype).unwrap();
        let Recipe { kernel: (of_type, of_operator), flip, divides } = Recipe::new(reduction);
        (TYPES[of_type], of_operator, flip, divides)
    }

    #[test]
    fn extremes_of_any_type_are_the_largest_of_flipped_words() {
        use Operator::{Average, Max, Maximum, Min, Minimum, Sum};
        assert_eq!(recipe(Max, DType::U8), (DType::U8, 1, 0, false));
        assert_eq!(recipe(Min, DType::U8), (DType::U8, 1, u64::MAX, false));
        assert_eq!(recipe(Max, DType::I16), (DType::U16, 1, 0x8000_8000_8000_8000, false));
        assert_eq!(recipe(Min, DType::I32), (DType::U32, 1, 0x7fff_ffff_7fff_ffff, false));
        assert_eq!(recipe(Sum, DType::I64), (DType::U64, 0, 0, false));
        assert_eq!(recipe(Min, DType::F64), (DType::F64, 1, 1 << 63, false));
        assert_eq!(recipe(Max, DType::Bf16), (DType::Bf16, 1, 0, false));
        assert_eq!(recipe(Average, DType::F16), (DType::F16, 0, 0, true));
        assert_eq!(recipe(Maximum, DType::F32), (DType::F32, 2, 0, false));
        assert_eq!(recipe(Minimum, DType::F16), (DType::F16, 2, 0x8000_8000_8000_8000, false));
        assert_eq!(recipe(Maximum, DType::I16), recipe(Max, DType::I16));
        assert_eq!(recipe(Minimum, DType::U64), recipe(Min, DType::U64));
    }

    #[test]
    fn every_kernel_is_in_the_text() {
        for (_, _, name) in kernel_names() {
            assert!(PTX.contains(&format!(".entry reduce_{name}(")), "{name}");
        }
        assert_eq!(PTX.matches(".entry ").count(), kernel_names().count());
    }
}
