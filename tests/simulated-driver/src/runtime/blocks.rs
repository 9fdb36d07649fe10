//! Holds the physical blocks of virtual memory management by handle.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use super::code::{INVALID_HANDLE, Outcome};
use crate::device::memory::Backing;
use crate::device::sync::lock;

/// A block: alive while it is held by handle or mapped.
#[derive(Debug)]
struct Block {
    /// How often the handle must still be released.
    held: u64,
    /// While it is held.
    backing: Option<Arc<Backing>>,
    /// While it is mapped.
    mapped: Weak<Backing>,
}

static BLOCKS: Mutex<BTreeMap<u64, Block>> = Mutex::new(BTreeMap::new());

/// Gives the block a handle.
pub(super) fn insert(backing: Backing) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0x56_0000_0000);
    let handle = NEXT.fetch_add(16, Ordering::Relaxed);
    let backing = Arc::new(backing);
    let block = Block { held: 1, mapped: Arc::downgrade(&backing), backing: Some(backing) };
    let mut blocks = lock(&BLOCKS);
    blocks.retain(|_, block| block.mapped.strong_count() > 0);
    blocks.insert(handle, block);
    handle
}

/// The memory behind a handle that is held.
pub(super) fn find(handle: u64) -> Outcome<Arc<Backing>> {
    let blocks = lock(&BLOCKS);
    blocks.get(&handle).and_then(|block| block.backing.clone()).ok_or(INVALID_HANDLE)
}

/// Holds a block once more, also one that is only mapped.
pub(super) fn retain(handle: u64) -> Outcome {
    let mut blocks = lock(&BLOCKS);
    let block = blocks.get_mut(&handle).ok_or(INVALID_HANDLE)?;
    block.backing = Some(block.mapped.upgrade().ok_or(INVALID_HANDLE)?);
    block.held += 1;
    Ok(())
}

/// Gives the handle up once.
pub(super) fn release(handle: u64) -> Outcome {
    let mut blocks = lock(&BLOCKS);
    let block = blocks.get_mut(&handle).filter(|block| block.held > 0).ok_or(INVALID_HANDLE)?;
    block.held -= 1;
    if block.held == 0 {
        block.backing = None;
    }
    Ok(())
}
