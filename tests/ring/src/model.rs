//! Models an invented accelerator and its vendor library.
//!
//! The port calls the public items of this file and nothing else, as it would call a vendor's library. This is the manual:
//!
//! - **Memory.** A device has memory that only devices access. Its addresses begin at 0, and 0 is a valid address. New memory
//!   holds the bytes of its previous use. The host accesses it by [`Device::read`] and [`Device::write`], which are slow.
//! - **Host memory.** [`Device::allocate_host`] allocates, and [`Device::pin`] makes any host memory accessible, at an address from
//!   [`PINNED`] on. The host loads and stores the bytes as usual.
//! - **Rings.** [`Device::ring`] creates a ring of [`SLOTS`] descriptors. The host [writes](Ring::write) descriptors, then stores
//!   the index after the last one in the [doorbell](Ring::doorbell). The device runs the descriptors in order, and increments the
//!   [completion counter](Ring::completed) when the effects of a descriptor are visible to all devices and hosts.
//! - **Indexes.** The index of a descriptor and the counter are 32-bit numbers that wrap around. The descriptor with index `i` is in
//!   slot `i % SLOTS`. A new ring does not begin at 0: the index of its first descriptor is in the counter.
//! - **Descriptors.** A device copies from its own addresses to the addresses of any device, 1 to [`COPY_BYTES_MAX`] bytes, or
//!   writes an aligned 64-bit word. It cannot read memory of another device, and it cannot wait.
//! - **Errors.** Errors are those of the operating system. After a descriptor that cannot run, the ring stops, and its error
//!   register keeps the error.
//!
//! All devices of a process are connected with each other. One thread for each ring stands for the hardware.

use std::collections::BTreeMap;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::thread::JoinHandle;

/// The number of devices.
pub const DEVICES: u32 = 16;
/// The size of the memory of a device in bytes.
pub const MEMORY_BYTES: u64 = 4 << 30;
/// The number of descriptors that a ring holds.
pub const SLOTS: u32 = 32;
/// The largest number of bytes that one descriptor copies.
pub const COPY_BYTES_MAX: u64 = 64 << 10;
/// The lowest device address of pinned host memory.
pub const PINNED: u64 = 1 << 63;

const ALIGNMENT: u64 = 256;
const PAGE_BYTES: u64 = 4096;
/// The first index of a ring, so that indexes wrap around soon.
const FIRST_INDEX: u32 = u32::MAX - 20;
const GARBAGE: u64 = 0xDBDB_DBDB_DBDB_DBDB;

const ENOMEM: i32 = 12;
const EFAULT: i32 = 14;
const ENODEV: i32 = 19;
const EINVAL: i32 = 22;
const EOVERFLOW: i32 = 75;

/// A device of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Device(u32);

/// An address of a device, which every device can write to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    /// The device whose memory or pinned host memory it is.
    pub device: Device,
    /// The address on that device.
    pub address: u64,
}

/// A command of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Descriptor {
    /// Copies bytes from the device that has the ring.
    Copy {
        /// The address of the first byte to write.
        dst: Address,
        /// The address of the first byte to read, on the device that has the ring.
        src: Address,
        /// The number of bytes, from 1 to [`COPY_BYTES_MAX`].
        bytes: u64,
    },
    /// Writes a 64-bit word at once.
    Write {
        /// The address of the word in bytes, a multiple of 8.
        dst: Address,
        /// The value of the word.
        value: u64,
    },
}

/// Memory that devices access: an allocation of a device, or pinned memory of the host.
struct Block {
    base: *mut u8,
    bytes: u64,
    _allocation: Option<Box<[AtomicU64]>>,
}

// SAFETY: devices and vendor calls access the bytes on any thread, and a program that shares them without an order between the
// accesses would be wrong on hardware too. The pointer stays valid until the block is removed from the map.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

/// What all devices can access. Readers of the lock access memory, so a writer that removes a block waits for them.
static MAP: RwLock<BTreeMap<Address, Block>> = RwLock::new(BTreeMap::new());
static NEXT_PIN: AtomicU64 = AtomicU64::new(PINNED);

type Map = BTreeMap<Address, Block>;

fn map() -> RwLockReadGuard<'static, Map> {
    MAP.read().unwrap_or_else(PoisonError::into_inner)
}

fn map_mut() -> RwLockWriteGuard<'static, Map> {
    MAP.write().unwrap_or_else(PoisonError::into_inner)
}

fn refused<T>(code: i32) -> io::Result<T> {
    Err(io::Error::from_raw_os_error(code))
}

/// Allocates memory that holds other bytes than zeros.
fn garbage(bytes: u64) -> io::Result<Box<[AtomicU64]>> {
    let words = usize::try_from(bytes.div_ceil(8)).or(refused(ENOMEM))?;
    let mut memory = Vec::new();
    memory.try_reserve_exact(words).or(refused(ENOMEM))?;
    memory.extend((0..words).map(|_| AtomicU64::new(GARBAGE)));
    Ok(memory.into_boxed_slice())
}

/// Translates an address, and returns a pointer to `bytes` bytes that are valid while the map is borrowed.
fn translate(map: &Map, at: Address, bytes: u64) -> Result<*mut u8, i32> {
    let (start, block) = map.range(..=at).next_back().ok_or(EFAULT)?;
    let offset = at.address.checked_sub(start.address).ok_or(EFAULT)?;
    let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= block.bytes);
    if start.device != at.device || !is_inside {
        return Err(EFAULT);
    }
    Ok(block.base.wrapping_add(offset as usize))
}

impl Device {
    /// Opens a device by its number.
    ///
    /// # Errors
    /// `ENODEV` if there is no such device.
    pub fn open(number: u32) -> io::Result<Self> {
        if number < DEVICES { Ok(Self(number)) } else { refused(ENODEV) }
    }

    /// Returns the number of the device.
    pub fn number(self) -> u32 {
        self.0
    }

    fn at(self, address: u64) -> Address {
        Address { device: self, address }
    }

    /// Allocates memory of the device, which is not cleared, and returns its address.
    ///
    /// # Errors
    /// `ENOMEM` if the memory of the device or of the model is used up.
    pub fn allocate(self, bytes: u64) -> io::Result<u64> {
        if bytes > MEMORY_BYTES {
            return refused(ENOMEM);
        }
        // Memory of no bytes has an address of its own too.
        let room_of = |bytes: u64| bytes.max(1).next_multiple_of(ALIGNMENT);
        let room = room_of(bytes);
        let memory = garbage(room)?;
        let mut map = map_mut();
        let mut address = 0;
        for (start, block) in map.range(self.at(0)..self.at(PINNED)) {
            if start.address - address >= room {
                break;
            }
            address = start.address + room_of(block.bytes);
        }
        if address + room > MEMORY_BYTES {
            return refused(ENOMEM);
        }
        let base = NonNull::from(&*memory).cast().as_ptr();
        map.insert(self.at(address), Block { base, bytes, _allocation: Some(memory) });
        Ok(address)
    }

    /// Allocates host memory that devices access, which is not cleared. Returns its address on this device, and where the host
    /// accesses it.
    ///
    /// # Errors
    /// `ENOMEM` if the memory of the host is used up.
    pub fn allocate_host(self, bytes: u64) -> io::Result<(u64, NonNull<u8>)> {
        let memory = garbage(bytes)?;
        let base = NonNull::from(&*memory).cast::<u8>();
        let block = Block { base: base.as_ptr(), bytes, _allocation: Some(memory) };
        Ok((self.map_host(block), base))
    }

    /// Makes host memory accessible to devices, and returns its address on this device.
    ///
    /// # Safety
    /// The memory lives until its address is [freed](Self::free).
    pub unsafe fn pin(self, base: *mut u8, bytes: u64) -> u64 {
        self.map_host(Block { base, bytes, _allocation: None })
    }

    /// Gives host memory an address that had no other use before.
    fn map_host(self, block: Block) -> u64 {
        let in_page = block.base.addr() as u64 % PAGE_BYTES;
        let pages = (in_page + block.bytes.max(1)).next_multiple_of(PAGE_BYTES);
        let address = NEXT_PIN.fetch_add(pages, Ordering::Relaxed) + in_page;
        map_mut().insert(self.at(address), block);
        address
    }

    /// Frees allocated memory, or unpins memory of the host. It waits for copies that access the memory now.
    pub fn free(self, address: u64) {
        let block = map_mut().remove(&self.at(address));
        drop(block);
    }

    /// Returns whether bytes are allocated or pinned.
    pub fn contains(self, address: u64, bytes: u64) -> bool {
        translate(&map(), self.at(address), bytes).is_ok()
    }

    /// Reads memory of the device, slowly.
    ///
    /// # Errors
    /// `EFAULT` if a byte is neither allocated nor pinned.
    pub fn read(self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        let map = map();
        let src = translate(&map, self.at(address), bytes.len() as u64);
        let src = src.map_err(io::Error::from_raw_os_error)?;
        // SAFETY: the map is locked, so the translated bytes live; the destination is another Rust object.
        unsafe { src.copy_to(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Writes memory of the device, slowly.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn write(self, address: u64, bytes: &[u8]) -> io::Result<()> {
        let map = map();
        let dst = translate(&map, self.at(address), bytes.len() as u64);
        let dst = dst.map_err(io::Error::from_raw_os_error)?;
        // SAFETY: as in `read`.
        unsafe { dst.copy_from(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Creates a ring.
    ///
    /// # Errors
    /// The error of the operating system if the model has no thread left.
    pub fn ring(self) -> io::Result<Ring> {
        let registers = Arc::new(Registers::default());
        let hardware = Arc::clone(&registers);
        let name = format!("device {}", self.0);
        let thread = std::thread::Builder::new().name(name).spawn(move || hardware.run(self))?;
        Ok(Ring { registers, thread: Some(thread) })
    }
}

impl Descriptor {
    fn run(self, device: Device) -> Result<(), i32> {
        let map = map();
        match self {
            Self::Copy { dst, src, bytes } => {
                if !(1..=COPY_BYTES_MAX).contains(&bytes) || src.device != device {
                    return Err(EINVAL);
                }
                let (src, dst) = (translate(&map, src, bytes)?, translate(&map, dst, bytes)?);
                // SAFETY: the map is locked, so both translated ranges live.
                unsafe { src.copy_to(dst, bytes as usize) };
            }
            Self::Write { dst, value } => {
                let word = translate(&map, dst, 8)?.cast::<u64>();
                if !word.is_aligned() {
                    return Err(EINVAL);
                }
                // SAFETY: the map is locked, so the translated word lives; it is aligned.
                unsafe { AtomicU64::from_ptr(word) }.store(value, Ordering::Release);
            }
        }
        Ok(())
    }
}

/// What the host and the hardware of a ring share.
#[derive(Debug)]
struct Registers {
    slots: Mutex<[Option<Descriptor>; SLOTS as usize]>,
    doorbell: Mutex<Doorbell>,
    rung: Condvar,
    completed: AtomicU32,
    error: AtomicI32,
}

#[derive(Debug)]
struct Doorbell {
    end: u32,
    closed: bool,
}

impl Default for Registers {
    fn default() -> Self {
        Self {
            slots: Mutex::default(),
            doorbell: Mutex::new(Doorbell { end: FIRST_INDEX, closed: false }),
            rung: Condvar::new(),
            completed: AtomicU32::new(FIRST_INDEX),
            error: AtomicI32::new(0),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registers {
    fn run(&self, device: Device) {
        let mut next = FIRST_INDEX;
        while let Some(end) = self.wait_for_doorbell(next) {
            if end.wrapping_sub(next) > SLOTS {
                return self.error.store(EOVERFLOW, Ordering::Release);
            }
            let descriptor = lock(&self.slots)[(next % SLOTS) as usize].take();
            if let Err(code) = descriptor.ok_or(EINVAL).and_then(|it| it.run(device)) {
                return self.error.store(code, Ordering::Release);
            }
            next = next.wrapping_add(1);
            self.completed.store(next, Ordering::Release);
        }
    }

    /// Waits until the doorbell differs from `next`, and returns its value, or `None` if the ring was closed.
    fn wait_for_doorbell(&self, next: u32) -> Option<u32> {
        let is_idle = |doorbell: &mut Doorbell| doorbell.end == next && !doorbell.closed;
        let doorbell = self.rung.wait_while(lock(&self.doorbell), is_idle);
        let doorbell = doorbell.unwrap_or_else(PoisonError::into_inner);
        (!doorbell.closed).then_some(doorbell.end)
    }
}

/// A ring of descriptors, which the device runs in order. A drop stops it after the current descriptor.
#[derive(Debug)]
pub struct Ring {
    registers: Arc<Registers>,
    thread: Option<JoinHandle<()>>,
}

impl Ring {
    /// Writes a descriptor to the slot of its index.
    pub fn write(&self, index: u32, descriptor: Descriptor) {
        lock(&self.registers.slots)[(index % SLOTS) as usize] = Some(descriptor);
    }

    /// Lets the device run the descriptors before the index `end`.
    pub fn doorbell(&self, end: u32) {
        lock(&self.registers.doorbell).end = end;
        self.registers.rung.notify_one();
    }

    /// Returns the index after the last descriptor that is complete.
    pub fn completed(&self) -> u32 {
        self.registers.completed.load(Ordering::Acquire)
    }

    /// Returns the error that stopped the ring, if there was one.
    pub fn error(&self) -> Option<io::Error> {
        let code = self.registers.error.load(Ordering::Acquire);
        (code != 0).then(|| io::Error::from_raw_os_error(code))
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        lock(&self.registers.doorbell).closed = true;
        self.registers.rung.notify_one();
        if let Some(thread) = self.thread.take() {
            // The thread does not panic, and the drop has no one to tell.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(ring: &Ring, descriptor: Descriptor) -> Option<i32> {
        let index = ring.completed();
        ring.write(index, descriptor);
        ring.doorbell(index.wrapping_add(1));
        while ring.completed() == index {
            if let Some(error) = ring.error() {
                return error.raw_os_error();
            }
            std::thread::yield_now();
        }
        None
    }

    #[test]
    fn memory_begins_at_0_and_is_not_cleared() {
        let device = Device::open(0).unwrap();
        let (first, second) = (device.allocate(100).unwrap(), device.allocate(1).unwrap());
        assert_eq!((first, second), (0, ALIGNMENT));
        let mut bytes = [0; 100];
        device.read(first, &mut bytes).unwrap();
        assert_eq!(bytes, [0xDB; 100]);
        device.free(first);
        assert_eq!(
            (device.allocate(0).unwrap(), device.allocate(200).unwrap()),
            (0, 2 * ALIGNMENT)
        );
        device.free(0);
        assert_eq!(device.allocate(200).unwrap(), 0);
        let code = |result: io::Result<()>| result.unwrap_err().raw_os_error();
        assert_eq!(code(device.write(150, &[0; 51])), Some(EFAULT));
        assert_eq!(code(device.allocate(MEMORY_BYTES + 1).map(drop)), Some(ENOMEM));
        assert_eq!(code(Device::open(DEVICES).map(drop)), Some(ENODEV));
    }

    #[test]
    fn the_counter_wraps_around_and_an_error_stays() {
        let [here, there] = [1, 2].map(|number| Device::open(number).unwrap());
        let at = |device: Device| device.at(device.allocate(COPY_BYTES_MAX + 8).unwrap());
        let (src, dst) = (at(here), at(there));
        let ring = here.ring().unwrap();
        for value in 0..100 {
            assert_eq!(run(&ring, Descriptor::Write { dst, value }), None);
        }
        assert!(ring.completed() < FIRST_INDEX);
        let copy = |dst, src, bytes| Descriptor::Copy { dst, src, bytes };
        let odd = Address { address: dst.address + 4, ..dst };
        let far = Address { address: dst.address + COPY_BYTES_MAX, ..dst };
        for (descriptor, code) in [
            (copy(dst, src, 0), EINVAL),
            (copy(dst, src, COPY_BYTES_MAX + 1), EINVAL),
            (copy(src, dst, 8), EINVAL),
            (Descriptor::Write { dst: odd, value: 0 }, EINVAL),
            (copy(far, src, 9), EFAULT),
        ] {
            let ring = here.ring().unwrap();
            assert_eq!(run(&ring, copy(dst, src, COPY_BYTES_MAX)), None);
            assert_eq!(run(&ring, descriptor), Some(code), "{descriptor:?}");
            assert_eq!(run(&ring, copy(dst, src, 8)), Some(code), "{descriptor:?}");
        }
    }
}
