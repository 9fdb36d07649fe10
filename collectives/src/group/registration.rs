//! Allocates and registers the memory of a [`Buffer`]: memory of Peerlane, memory of the caller by
//! its address, and memory of the caller in a file.

use std::os::fd::AsFd;
use std::ptr::NonNull;

use peerlane_hal::{DynError, Fabric, PeerMemory, Role};
use peerlane_toolkit::Fault;
use peerlane_toolkit::mapping::Mapping;

use crate::element::Element;
use crate::error::Error;
use crate::group::{Buffer, Group, operation};

impl Group {
    /// Allocates zeroed, registered memory for `len` elements, which peers can write to.
    ///
    /// # Errors
    /// [`OutOfMemory`](peerlane_hal::ErrorKind::OutOfMemory).
    pub fn allocate<T: Element>(&self, len: usize) -> Result<Buffer<T>, Error> {
        let bytes = operation::bytes(T::DTYPE, "len", len)?;
        let region = self.setup.fabric.memory().allocate(bytes, Role::Data);
        region.map(Buffer::new).map_err(|error| Error::of_fabric("allocate a buffer", error))
    }

    /// Registers a slice of the caller, so that operations can use it as input or output.
    ///
    /// What memory can be used for depends on where its bytes are:
    ///
    /// | memory | registered by | can be used for |
    /// | --- | --- | --- |
    /// | of Peerlane | [`allocate`](Self::allocate), [`window`](Self::window) | everything |
    /// | of the host, such as `malloc`; ranks are threads of one process, or only a network connects them | `register`, [`register_at`](Self::register_at) | everything |
    /// | the same; ranks are processes of one machine | `register`, [`register_at`](Self::register_at) | input of all algorithms but `pull` and `get-ring`; otherwise [`Operation::run_with`] |
    /// | of the host, such as `malloc`; the group uses GPUs | | nothing |
    /// | a memfd, also one of huge pages (`MFD_HUGETLB`) | [`register_descriptor`](Self::register_descriptor) | everything |
    /// | a file of `/dev/shm` or of another tmpfs | [`register_descriptor`](Self::register_descriptor) | everything |
    /// | a file of a hugetlbfs | [`register_descriptor`](Self::register_descriptor) | everything |
    /// | `cudaMalloc`, `cuMemAlloc`, `hipMalloc` | [`register_at`](Self::register_at) | everything |
    /// | mapped on a GPU (`cuMemMap`), such as expandable segments of PyTorch | [`register_at`](Self::register_at) | everything, if its allocator requested handles as POSIX file descriptors; otherwise as a pool |
    /// | a stream-ordered pool, such as `cudaMallocAsync` | [`register_at`](Self::register_at) | input of all algorithms but `pull` and `get-ring`, output of `pull`; otherwise copy on the stream to [`Operation::input_memory`] |
    ///
    /// A window is input and output of its operations, so it needs memory that can be used for
    /// everything. A whole arena of an allocator can be registered once:
    /// [`window_over`](Self::window_over) it, and prepare
    /// [resizable](crate::group::OperationBuilder::resizable) operations over the window.
    ///
    /// [`Operation::run_with`]: crate::group::Operation::run_with
    /// [`Operation::input_memory`]: crate::group::Operation::input_memory
    ///
    /// # Errors
    /// If the fabric cannot register such memory.
    ///
    /// # Safety
    /// The slice must stay allocated until the buffer and the operation that owns it are dropped on
    /// every rank. A [`barrier`](Self::barrier) after the drops ensures this. A window over the
    /// buffer gives the memory back in [`release`](Self::release) instead. If the group ends with
    /// an error, the slice must stay allocated until every rank has dropped its group.
    ///
    /// Nobody may access the slice while an operation that uses it has an open start, or while a
    /// slice that the operation or the window has returned is borrowed. At other times the caller
    /// may read and write it.
    pub unsafe fn register<T: Element>(&self, slice: &mut [T]) -> Result<Buffer<T>, Error> {
        // SAFETY: the caller keeps the slice allocated and away from others, as this contract says.
        unsafe { self.register_at(NonNull::from(&mut *slice).cast(), slice.len()) }
    }

    /// Registers the caller's memory at an address, such as device memory that the host cannot
    /// access as a slice.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    ///
    /// # Safety
    /// As for [`register`](Self::register): `len` elements, starting at `base`.
    pub unsafe fn register_at<T: Element>(
        &self,
        base: NonNull<u8>,
        len: usize,
    ) -> Result<Buffer<T>, Error> {
        let bytes = operation::bytes(T::DTYPE, "len", len)?;
        // SAFETY: the caller keeps the memory allocated and away from others, as this contract
        // says.
        let region = unsafe { self.setup.fabric.memory().register(base, bytes, Role::Data) };
        region.map(Buffer::new).map_err(|error| Error::of_fabric("register a buffer", error))
    }

    /// Registers a part of a file of the caller, so that ranks in other processes can use it as
    /// input, output and window.
    ///
    /// The part begins `offset` bytes after the start of the file, a multiple of its page size, and
    /// has `len` elements. The file is a memfd, or a file of `/dev/shm` or of a hugetlbfs, whose
    /// pages are larger. [`register`](Self::register) has a table of other memory.
    ///
    /// Peerlane maps the part at an address of its own, and keeps that mapping and a duplicate of
    /// the descriptor until this rank no longer uses the memory. Another mapping of the file, such
    /// as that of the caller's allocator, shows the same bytes:
    ///
    /// ```
    /// use std::fs::File;
    /// use std::os::unix::fs::FileExt;
    ///
    /// use peerlane::bootstrap::{Bootstrap, in_process};
    /// use peerlane::{Group, host};
    /// use rustix::fs::{MemfdFlags, memfd_create};
    ///
    /// # in_process::run(2, |bootstrap| {
    /// #     let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    /// #     let mut group = Group::open(bootstrap, fabric)?;
    /// // An arena of two pages: the input is in the first one, and the output in the second one.
    /// let page = rustix::param::page_size() as u64;
    /// let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    /// let arena = File::from(memfd_create("arena", flags).unwrap());
    /// arena.set_len(2 * page).unwrap();
    ///
    /// // SAFETY: the file keeps its pages, and is accessed while no operation is open only.
    /// let input = unsafe { group.register_descriptor::<u8>(&arena, 0, 3) }?;
    /// // SAFETY: as above.
    /// let output = unsafe { group.register_descriptor::<u8>(&arena, page, 6) }?;
    /// let mut gather = group.all_gather(3).input(input).output(output).prepare()?;
    ///
    /// // The arena is read and written through the file, as through any other mapping of it.
    /// let rank = group.rank().0 as u8;
    /// arena.write_all_at(&[rank; 3], 0).unwrap();
    /// gather.run()?;
    /// let mut gathered = [0; 6];
    /// arena.read_exact_at(&mut gathered, page).unwrap();
    /// assert_eq!(gathered, [0, 0, 0, 1, 1, 1]);
    /// #     drop(gather);
    /// #     group.close()
    /// # })
    /// # .unwrap();
    /// ```
    ///
    /// A memfd that was created with `MFD_ALLOW_SEALING` gets the seal `F_SEAL_SHRINK`, which lasts
    /// as long as the file. So nobody can shorten it. It is still possible to add pages at its end.
    ///
    /// The system allocates pages that the file does not have yet when they are first used, by this
    /// rank or a peer, and sends `SIGBUS` if it has none left. Allocate them before with
    /// `posix_fallocate` where that can happen, as in a small `/dev/shm` of a container.
    ///
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if `len` elements exceed the
    /// address space, `offset` is no multiple of the page size, or the file ends before the last
    /// element; or if the descriptor is that of a pipe, a socket, a device or a folder, was not
    /// opened for reading and writing, or is sealed against writing;
    /// [`OutOfMemory`](peerlane_hal::ErrorKind::OutOfMemory) if the process has no descriptor or no
    /// address space left, or the system no huge page; the errors of the fabric.
    ///
    /// # Safety
    /// The bytes of the part are memory that the caller shares as for [`register`](Self::register):
    /// nobody may access them, through the file or any mapping of it, while an operation that uses
    /// them has an open start, or while a slice of them is borrowed.
    ///
    /// Until the memory is given back as described there, the file must not be shortened, and must
    /// keep its pages: no process punches holes into it (`fallocate`, `MADV_REMOVE`). A process
    /// that accesses a page behind the end of the file is killed by `SIGBUS`. Closing the
    /// descriptor, unmapping the file and removing its name are allowed.
    pub unsafe fn register_descriptor<T: Element>(
        &self,
        descriptor: impl AsFd,
        offset: u64,
        len: usize,
    ) -> Result<Buffer<T>, Error> {
        let bytes = operation::bytes(T::DTYPE, "len", len)?;
        let what = "register a buffer";

        // SAFETY: the caller promises not to shorten the file and to keep its pages until peers and
        // this rank no longer use the memory.
        let mapping = unsafe { Mapping::from_descriptor(descriptor.as_fd(), offset, bytes) };
        let mapping = mapping
            .map_err(|error| Error::of_backend(what, Fault::of_mapping(self.rank())(error)))?;

        let memory = self.setup.fabric.memory();
        // SAFETY: the region keeps the mapping (`keep_alive`), and every importer maps the file for
        // itself or shares the registration; the caller keeps the bytes away from others.
        let region = unsafe { memory.register(mapping.base(), bytes, Role::Data) };
        let region = region.map_err(|error: DynError| Error::of_fabric(what, error))?;
        Ok(Buffer::new(region.keep_alive(mapping)))
    }
}
