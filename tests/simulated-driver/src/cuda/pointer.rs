//! What the driver knows about an address.

use std::ffi::{c_int, c_void};

use super::Cuda;
use super::types::{CUdeviceptr, CUresult};
use crate::runtime::call::enter;
use crate::runtime::pointer;

#[unsafe(no_mangle)]
extern "C" fn cuPointerGetAttribute(
    out: *mut c_void,
    attribute: c_int,
    address: CUdeviceptr,
) -> CUresult {
    enter("cuPointerGetAttribute", || pointer::attribute::<Cuda>(out, attribute, address))
}
