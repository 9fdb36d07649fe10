//! Implements modules and launches, for the kernels of Peerlane only: reductions and whole starts.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use super::Api;
use super::call::refuse_during_capture;
use super::code::{Code, INVALID_PTX, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, Outcome};
use super::handles::{Table, stream};
use super::out::{Out, store};
use crate::device::command::Command;
use crate::device::machine::memory;
use crate::device::reduce::Reduce;
use crate::device::settings::Setting;
use crate::device::start::{Program, Start};

/// The kernels of modules.
static MODULES: Table<Vec<Kernel>> = Table::new(0x57_0000_0000);
/// The kernels that were found.
static FUNCTIONS: Table<Kernel> = Table::new(0x58_0000_0000);

/// As in Peerlane's kernels.
const SOURCES_MAX: usize = 128;
/// What the names of kernels of whole starts begin with.
const START: &str = "start_";
/// What follows it in the kernel without a reduction.
const COPIES: &str = "copy";

/// `CU_JIT_ERROR_LOG_BUFFER`.
const ERROR_LOG: c_int = 5;
const REFUSAL: &CStr = c"ptxas fatal: unsupported version";

/// A kernel of a module.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    name: String,
    /// What it does, if it is one of Peerlane's, which are the only ones that run.
    kind: Option<Kind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Reduction,
    Start,
}

impl Kernel {
    /// A kernel is known by its name and the size of its parameter.
    fn new(name: &str, module: &str) -> Self {
        let has = |parameter: u32, bytes: usize| {
            module.contains(&format!("{name}_param_{parameter}[{bytes}]"))
        };
        let kind = if name.starts_with("reduce_") && has(1, SOURCES_MAX * size_of::<u64>()) {
            Some(Kind::Reduction)
        } else if name.starts_with(START) && has(0, size_of::<Program>()) {
            Some(Kind::Start)
        } else {
            None
        };
        Self { name: name.to_owned(), kind }
    }
}

/// Loads the text of a module. Of the options only the buffer for errors is known.
pub(crate) fn load<A: Api>(
    module: Out<'_, usize>,
    text: *const c_char,
    options: (c_uint, *const c_int, *const *mut c_void),
) -> Outcome {
    A::current()?;
    refuse_during_capture()?;
    if text.is_null() {
        return Err(INVALID_VALUE);
    }
    if Setting::Ptx.is("refused") {
        let (count, names, values) = options;
        // SAFETY: the caller gives as many names of options as values.
        let names = unsafe { std::slice::from_raw_parts(names, count as usize) };
        // SAFETY: as above.
        let values = unsafe { std::slice::from_raw_parts(values, count as usize) };
        if let Some(log) = names.iter().position(|name| *name == ERROR_LOG) {
            let text = REFUSAL.to_bytes_with_nul();
            // SAFETY: the value is a buffer, which real drivers fill with longer texts.
            unsafe { values[log].cast::<u8>().copy_from(text.as_ptr(), text.len()) };
        }
        return Err(INVALID_PTX);
    }
    // SAFETY: the caller gives a text that ends with a zero.
    let text = unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| INVALID_PTX)?;
    let names = text.split(".entry ").skip(1).filter_map(|rest| rest.split('(').next());
    let kernels: Vec<_> = names.map(|name| Kernel::new(name, text)).collect();
    if kernels.is_empty() {
        return Err(INVALID_PTX);
    }
    store(module, MODULES.insert(Arc::new(kernels)))
}

/// Finds a kernel. Refuses one that the devices cannot run, so that no launch reads its parameters.
pub(crate) fn function<A: Api>(
    function: Out<'_, usize>,
    module: usize,
    name: *const c_char,
) -> Outcome {
    A::current()?;
    // SAFETY: the caller gives a text that ends with a zero.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| INVALID_VALUE)?;
    let kernels = MODULES.find(module)?;
    let kernel = kernels.iter().find(|kernel| kernel.name == name).ok_or(NOT_FOUND)?;
    if kernel.kind.is_none() {
        return Err(NOT_SUPPORTED);
    }
    store(function, FUNCTIONS.insert(Arc::new(kernel.clone())))
}

/// Launches a kernel.
///
/// # Safety
/// `parameters` are as in `kernels/reduce.cu` or `kernels/start.cu`.
pub(crate) unsafe fn launch<A: Api>(
    function: usize,
    [blocks, threads]: [c_uint; 2],
    handle: usize,
    parameters: *const *const c_void,
) -> Outcome {
    let kernel = FUNCTIONS.find(function)?;
    let queue = stream::<A>(handle)?;
    if blocks == 0 || !(1..=1024).contains(&threads) || parameters.is_null() {
        return Err(INVALID_VALUE);
    }

    let command = match kernel.kind {
        // SAFETY: the caller's, for a kernel of this kind.
        Some(Kind::Start) => unsafe { start(&kernel.name, [blocks, threads], parameters) }?,
        // SAFETY: as above.
        _ => unsafe { reduction(&kernel.name, parameters) }?,
    };
    Ok(queue.submit(command)?)
}

/// Returns the command for a whole start.
///
/// # Safety
/// As [`launch`].
unsafe fn start(
    name: &str,
    [blocks, threads]: [c_uint; 2],
    parameters: *const *const c_void,
) -> Result<Command, Code> {
    // SAFETY: the caller's.
    let program = unsafe { *parameters };
    // SAFETY: as above; the parameter has this type, all of whose values are valid.
    let program = unsafe { program.cast::<Program>().read() };

    let kernel = name.strip_prefix(START).ok_or(INVALID_VALUE)?;
    let reduces = kernel != COPIES;
    if !program.is_valid(reduces) {
        return Err(INVALID_VALUE);
    }
    let reduction = match reduces {
        true => {
            let sources = program.contributions();
            let found = Reduce::reduction(kernel, program.flip, program.divisor, sources);
            Some(found.ok_or(INVALID_VALUE)?)
        }
        false => None,
    };
    Ok(Command::Start(Start { program: Arc::new(program), reduction, blocks, threads }))
}

/// Returns the command for a reduction.
///
/// # Safety
/// As [`launch`].
unsafe fn reduction(name: &str, parameters: *const *const c_void) -> Result<Command, Code> {
    // SAFETY: the caller's.
    let parameters = unsafe { std::slice::from_raw_parts(parameters, 6) };
    // SAFETY: the caller's, for this value and the next ones.
    let target = unsafe { parameters[0].cast::<u64>().read() };
    // SAFETY: as above.
    let places = unsafe { parameters[1].cast::<[u64; SOURCES_MAX]>().read() };
    // SAFETY: as above.
    let number = unsafe { parameters[2].cast::<u32>().read() } as usize;
    // SAFETY: as above.
    let divisor = unsafe { parameters[3].cast::<u32>().read() };
    // SAFETY: as above.
    let flip = unsafe { parameters[4].cast::<u64>().read() };
    // SAFETY: as above.
    let count = unsafe { parameters[5].cast::<u64>().read() };
    if !(1..=SOURCES_MAX).contains(&number) {
        return Err(INVALID_VALUE);
    }
    let sources: Arc<[u64]> = Arc::from(&places[..number]);
    let kernel = name.strip_prefix("reduce_").ok_or(INVALID_VALUE)?;
    let reduction = Reduce::reduction(kernel, flip, divisor, number).ok_or(INVALID_VALUE)?;
    let element = reduction.dtype().bytes() as u64;
    let bytes = count * element;
    let is_valid = |place: &u64| place.is_multiple_of(element) && memory().holds(*place, bytes);
    // A device reports such an address when the kernel runs.
    if !sources.iter().chain([&target]).all(is_valid) {
        return Err(INVALID_VALUE);
    }
    Ok(Command::Reduce(Reduce { target, sources, bytes, reduction }))
}
