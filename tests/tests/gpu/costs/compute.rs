//! Observes on a GPU whether a start needs compute units: it runs beside a kernel that occupies all of them.

use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cudarc::driver::{result, sys};
use peerlane_tests::Outcome;

use crate::support::data::{check, unexpected};
use crate::support::test_rank::TestRank;
use crate::vendor::gpu::refused;

/// A kernel that runs until the host sets a word.
const KERNEL: &str = "
.version 7.0
.target sm_70
.address_size 64
.visible .entry occupy(.param .u64 word) {
    .reg .pred %p;
    .reg .b64 %address;
    .reg .b32 %seen;
    ld.param.u64 %address, [word];
again:
    ld.volatile.u32 %seen, [%address];
    setp.eq.u32 %p, %seen, 0;
    @%p bra again;
    ret;
}";
/// Number of threads in a block of the kernel.
const THREADS: i32 = 1024;
const BLOCK_BYTES: [usize; 5] = [4096, 64 << 10, 256 << 10, 1 << 20, 16 << 20];
/// Time in which the kernel begins on all units.
const BEGINS: Duration = Duration::from_millis(50);
/// Time in which a start is complete that needs no compute unit.
const COMPLETES: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_secs(20);

/// Starts are complete beside the kernel if, and only if, the report says that compute units copy nothing.
pub(crate) fn compute_units(test_rank: &mut TestRank) -> Outcome {
    let occupy = load()?;
    let attribute = |attribute| {
        result::device::get(test_rank.gpu.ordinal as i32)
            // SAFETY: a device of this machine.
            .and_then(|device| unsafe { result::device::get_attribute(device, attribute) })
            .map_err(refused("ask for the compute units"))
    };
    use sys::CUdevice_attribute as Attribute;
    let units = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let threads = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?;
    let blocks = (units * threads / THREADS).unsigned_abs();
    let word = test_rank.gpu.pinned(4)?;
    // SAFETY: four bytes at the begin of a page, which only the kernel and this function access.
    let word_here = unsafe { AtomicU32::from_ptr(word.base.as_ptr().cast()) };
    let (busy, stream) = (test_rank.gpu.stream()?, test_rank.gpu.stream()?);
    for bytes in BLOCK_BYTES {
        let mut gather = test_rank.group.all_gather::<u8>(bytes).prepare().map_err(unexpected)?;
        let declared = gather.report().tiers.iter().map(|tier| tier.compute_bytes).sum::<u64>();
        // The driver loads its own kernels at the first use, and waits for all others there.
        gather.start_on(&stream.for_starts()).map(drop).map_err(unexpected)?;
        stream.finish_within(PATIENCE)?;
        word_here.store(0, Ordering::SeqCst);
        let mut address = word.base.as_ptr() as u64;
        let mut parameters = [(&raw mut address).cast::<c_void>()];
        let (grid, block) = ((blocks, 1, 1), (THREADS.unsigned_abs(), 1, 1));
        let raw = busy.raw.cu_stream();
        // SAFETY: the kernel takes one address, of pinned memory that lives until the stream is finished.
        unsafe { result::launch_kernel(occupy, grid, block, 0, raw, &mut parameters) }
            .map_err(refused("launch a kernel"))?;
        std::thread::sleep(BEGINS);
        let started = gather.start_on(&stream.for_starts()).map(drop);
        let completed = started.is_ok() && stream.finish_within(COMPLETES).is_ok();
        word_here.store(1, Ordering::SeqCst);
        busy.finish_within(PATIENCE)?;
        stream.finish_within(PATIENCE)?;
        started.map_err(unexpected)?;
        check(completed == (declared == 0), || {
            format!(
                "blocks of {bytes} bytes: compute units copy {declared} bytes according to the report, but the \
                 start was{} complete while a kernel occupied all of them",
                if completed { "" } else { " not" }
            )
        })?;
    }
    Ok(())
}

fn load() -> Outcome<sys::CUfunction> {
    let text = CString::new(KERNEL).expect("the text has no zero");
    // SAFETY: the text is PTX that ends with a zero; the context is current. The module stays loaded.
    let module = unsafe { result::module::load_data(text.as_ptr().cast()) };
    let module = module.map_err(refused("load a kernel"))?;
    let name = CString::new("occupy").expect("the name has no zero");
    // SAFETY: the module was just loaded.
    unsafe { result::module::get_function(module, name) }.map_err(refused("find a kernel"))
}
