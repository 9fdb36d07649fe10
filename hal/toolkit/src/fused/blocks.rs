//! Counts the blocks of threads that may wait on a device at the same time.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use peerlane_hal::BackendId;

use crate::Fault;

/// A backend and the UUID of a device.
pub type DeviceKey = (BackendId, [u8; 16]);

/// The number of blocks that the engines of this process have reserved, by device.
static RESERVED: LazyLock<Mutex<HashMap<DeviceKey, u32>>> = LazyLock::new(Mutex::default);

/// Blocks of threads that are reserved until this is dropped.
///
/// Blocks that wait for peers keep their multiprocessors. If those of all engines fit on a device,
/// every launch can run whatever else waits, so starts of several operations never wait for each
/// other, in any order.
#[derive(Debug)]
pub struct ReservedBlocks {
    device: DeviceKey,
    blocks: u32,
}

impl ReservedBlocks {
    /// Reserves blocks on a device, on which `most` blocks can run at the same time.
    ///
    /// # Errors
    /// [`Fault::Unavailable`] if there is no room for them beside the reserved ones.
    pub fn reserve(device: DeviceKey, blocks: u32, most: u32) -> Result<Self, Fault> {
        let mut all = RESERVED.lock().unwrap_or_else(PoisonError::into_inner);
        let reserved = all.entry(device).or_default();
        match reserved.checked_add(blocks).filter(|sum| *sum <= most) {
            Some(sum) => *reserved = sum,
            None => {
                return Err(Fault::Unavailable(format!(
                    "{blocks} blocks of threads do not fit on the device beside the {reserved} that \
                     other operations have reserved: {most} can run at the same time"
                )));
            }
        }
        Ok(Self { device, blocks })
    }

    /// Returns the number of reserved blocks.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }
}

impl Drop for ReservedBlocks {
    fn drop(&mut self) {
        let mut all = RESERVED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reserved) = all.get_mut(&self.device) {
            *reserved -= self.blocks;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fit_beside_those_of_others() {
        let device = (BackendId(0x80ff), [7; 16]);
        let reserve = |blocks| ReservedBlocks::reserve(device, blocks, 100);
        let first = reserve(60).unwrap();
        let text = reserve(41).unwrap_err().to_string();
        assert!(text.contains("41 blocks") && text.contains("the 60"), "{text}");
        let second = reserve(40).unwrap();
        assert!(reserve(1).is_err());
        drop(first);
        assert_eq!((second.blocks(), reserve(60).unwrap().blocks()), (40, 60));
        assert!(reserve(u32::MAX).is_err(), "the sum overflows");
    }
}
