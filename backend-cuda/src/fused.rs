//! Runs whole starts by launches of the kernels of `kernels/start.cu`.
//!
//! The driver compiles the PTX of a kernel when the first operation that needs it is prepared.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use peerlane_hal::{FusedLimits, Reduction};
use peerlane_toolkit::device::{FusedCalls, FusedKernel, StreamHandle};
use peerlane_toolkit::fused::{PEERS_MAX, Program, THREADS};

use crate::device::Context;
use crate::error::Error;
use crate::reduce::{Recipe, find_kernel, kernel_name, load_module};
use crate::sys::CUfunction;

const PTX: &str = include_str!("../kernels/start.ptx");

/// The most blocks of a launch: a block for nearly every multiprocessor of an H100. More do not
/// copy faster (docs/adr/0031-fused-starts.md).
const BLOCKS_MAX: u32 = 128;
/// The blocks that a multiprocessor of any device since compute capability 7.0 runs at the same
/// time, by the launch bounds of the kernels.
const BLOCKS_OF_MULTIPROCESSOR: u32 = 2;
/// The least compute capability that has the fences and atomic loads of the kernels.
const CAPABILITY_MIN: (u32, u32) = (7, 0);

/// The kernels for fused starts that are loaded in one context, by name. They stay loaded as long
/// as the context lives.
#[derive(Debug, Default)]
pub(crate) struct StartKernels(Mutex<HashMap<String, CUfunction>>);

// SAFETY: functions are handles for the driver, which takes them on any thread.
unsafe impl Send for StartKernels {}
// SAFETY: as above.
unsafe impl Sync for StartKernels {}

impl StartKernels {
    /// Returns a kernel, which the driver compiles when it is first asked for.
    fn load(&self, context: &Context, name: &str) -> Result<CUfunction, Error> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = known.get(name) {
            return Ok(*function);
        }

        let module = load_module(context, &module_of(name), "fused starts")?;
        let function = find_kernel(context, module, name)?;
        known.insert(name.to_owned(), function);
        Ok(function)
    }
}

/// Returns the PTX of one kernel: a driver takes seconds to compile all of them.
fn module_of(name: &str) -> String {
    let mut parts = PTX.split(ENTRY);
    let header = parts.next().unwrap_or_default();
    let is_wanted = |part: &&str| part.strip_prefix(name).is_some_and(|rest| rest.starts_with('('));
    let kernel = parts.find(is_wanted).unwrap_or_default();
    format!("{header}{ENTRY}{kernel}")
}

const ENTRY: &str = ".visible .entry ";

// SAFETY: the kernels of `start.cu` do what a program says, and wait only as it says. The driver
// copies the parameter of a launch.
unsafe impl FusedCalls for Context {
    fn fused_limits(&self) -> Option<FusedLimits> {
        let blocks_max = BLOCKS_MAX.min(self.resident_blocks_max());
        let is_new = self.info.compute_capability >= CAPABILITY_MIN && self.driver.has_kernels();
        (is_new && blocks_max > 0).then_some(FusedLimits {
            blocks_max,
            threads: THREADS,
            ranks_max: PEERS_MAX,
            shares_device: false,
        })
    }

    fn resident_blocks_max(&self) -> u32 {
        self.info.multiprocessors.saturating_mul(BLOCKS_OF_MULTIPROCESSOR)
    }

    fn prepare_fused(&self, reduction: Option<Reduction>) -> Result<FusedKernel, Error> {
        let recipe = reduction.map(Recipe::new);
        let name = match &recipe {
            Some(Recipe { kernel, .. }) => format!("start_{}", kernel_name(*kernel)),
            None => "start_copy".to_owned(),
        };
        let handle = self.starts.load(self, &name)?;

        let (flip, divides) = recipe.map_or((0, false), |recipe| (recipe.flip, recipe.divides));
        Ok(FusedKernel { handle, flip, divides })
    }

    unsafe fn launch_fused(
        &self,
        stream: StreamHandle,
        kernel: FusedKernel,
        program: &Program,
        blocks: u32,
    ) -> Result<(), Error> {
        let launch = self.require("cuLaunchKernel", self.driver.launch_kernel)?;
        let mut parameters = [std::ptr::from_ref(program).cast_mut().cast::<c_void>()];
        let (parameters, none) = (parameters.as_mut_ptr(), std::ptr::null_mut());
        let (handle, stream) = (kernel.handle, stream.0);
        // SAFETY: the parameter is that of the kernel, and the driver copies it. The caller vouches
        // for the rest.
        let code =
            unsafe { launch(handle, blocks, 1, 1, THREADS, 1, 1, 0, stream, parameters, none) };
        self.check("cuLaunchKernel", code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_is_a_module_of_its_own() {
        let of_types = crate::reduce::kernel_names().map(|(_, _, name)| format!("start_{name}"));
        let names: Vec<String> = of_types.chain(["start_copy".to_owned()]).collect();
        for name in &names {
            let module = module_of(name);
            assert!(module.starts_with("//") && module.contains(".target sm_70"), "{name}");
            assert!(module.contains(&format!("{ENTRY}{name}(")), "{name}");
            assert_eq!(module.matches(ENTRY).count(), 1, "{name}");
        }
        assert_eq!(PTX.matches(ENTRY).count(), names.len());
    }
}
