/* Compares python/src/xla_ffi.h with XLA's own header, which jaxlib brings. Nothing runs: it compiles, or names the
 * field that differs. */
#include <stddef.h>

#include <xla/ffi/api/c_api.h>

#include "xla_ffi.h"

#define SAME(ours, our_field, theirs, their_field)                                                                     \
    _Static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field) &&                                       \
                       sizeof(((ours *)0)->our_field) == sizeof(((theirs *)0)->their_field),                           \
                   #ours "." #our_field " is not " #theirs "." #their_field)

SAME(xla_extension, size, XLA_FFI_Extension_Base, struct_size);
SAME(xla_extension, type, XLA_FFI_Extension_Base, type);
SAME(xla_extension, next, XLA_FFI_Extension_Base, next);

SAME(xla_version, size, XLA_FFI_Api_Version, struct_size);
SAME(xla_version, extension, XLA_FFI_Api_Version, extension_start);
SAME(xla_version, major, XLA_FFI_Api_Version, major_version);
SAME(xla_version, minor, XLA_FFI_Api_Version, minor_version);

SAME(xla_metadata, size, XLA_FFI_Metadata, struct_size);
SAME(xla_metadata, api_version, XLA_FFI_Metadata, api_version);
SAME(xla_metadata, traits, XLA_FFI_Metadata, traits);
SAME(xla_metadata_extension, base, XLA_FFI_Metadata_Extension, extension_base);
SAME(xla_metadata_extension, metadata, XLA_FFI_Metadata_Extension, metadata);

SAME(xla_error_create, size, XLA_FFI_Error_Create_Args, struct_size);
SAME(xla_error_create, extension, XLA_FFI_Error_Create_Args, extension_start);
SAME(xla_error_create, message, XLA_FFI_Error_Create_Args, message);
SAME(xla_error_create, code, XLA_FFI_Error_Create_Args, errc);

SAME(xla_stream_get, size, XLA_FFI_Stream_Get_Args, struct_size);
SAME(xla_stream_get, ctx, XLA_FFI_Stream_Get_Args, ctx);
SAME(xla_stream_get, stream, XLA_FFI_Stream_Get_Args, stream);
SAME(xla_device_ordinal_get, size, XLA_FFI_DeviceOrdinal_Get_Args, struct_size);
SAME(xla_device_ordinal_get, ctx, XLA_FFI_DeviceOrdinal_Get_Args, ctx);
SAME(xla_device_ordinal_get, ordinal, XLA_FFI_DeviceOrdinal_Get_Args, device_ordinal);

SAME(xla_api, size, XLA_FFI_Api, struct_size);
SAME(xla_api, version, XLA_FFI_Api, api_version);
SAME(xla_api, create_error, XLA_FFI_Api, XLA_FFI_Error_Create);
SAME(xla_api, get_stream, XLA_FFI_Api, XLA_FFI_Stream_Get);
SAME(xla_api, get_device_ordinal, XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get);

SAME(xla_buffer, size, XLA_FFI_Buffer, struct_size);
SAME(xla_buffer, dtype, XLA_FFI_Buffer, dtype);
SAME(xla_buffer, data, XLA_FFI_Buffer, data);
SAME(xla_buffer, rank, XLA_FFI_Buffer, rank);
SAME(xla_buffer, dims, XLA_FFI_Buffer, dims);
SAME(xla_buffers, count, XLA_FFI_Args, size);
SAME(xla_buffers, types, XLA_FFI_Args, types);
SAME(xla_buffers, buffers, XLA_FFI_Args, args);
SAME(xla_buffers, count, XLA_FFI_Rets, size);
SAME(xla_buffers, types, XLA_FFI_Rets, types);
SAME(xla_buffers, buffers, XLA_FFI_Rets, rets);

SAME(xla_text, bytes, XLA_FFI_ByteSpan, ptr);
SAME(xla_text, length, XLA_FFI_ByteSpan, len);
SAME(xla_array, dtype, XLA_FFI_Array, dtype);
SAME(xla_array, count, XLA_FFI_Array, size);
SAME(xla_array, data, XLA_FFI_Array, data);
SAME(xla_attributes, count, XLA_FFI_Attrs, size);
SAME(xla_attributes, types, XLA_FFI_Attrs, types);
SAME(xla_attributes, names, XLA_FFI_Attrs, names);
SAME(xla_attributes, values, XLA_FFI_Attrs, attrs);

SAME(xla_call_frame, size, XLA_FFI_CallFrame, struct_size);
SAME(xla_call_frame, extension, XLA_FFI_CallFrame, extension_start);
SAME(xla_call_frame, api, XLA_FFI_CallFrame, api);
SAME(xla_call_frame, ctx, XLA_FFI_CallFrame, ctx);
SAME(xla_call_frame, stage, XLA_FFI_CallFrame, stage);
SAME(xla_call_frame, arguments, XLA_FFI_CallFrame, args);
SAME(xla_call_frame, results, XLA_FFI_CallFrame, rets);
SAME(xla_call_frame, attributes, XLA_FFI_CallFrame, attrs);
SAME(xla_call_frame, future, XLA_FFI_CallFrame, future);

_Static_assert((int)XLA_METADATA == XLA_FFI_Extension_Metadata, "numbers of extensions");
_Static_assert((int)XLA_ATTRIBUTE_ARRAY == XLA_FFI_AttrType_ARRAY &&
                   (int)XLA_ATTRIBUTE_STRING == XLA_FFI_AttrType_STRING,
               "numbers of attributes' types");
_Static_assert((int)XLA_S64 == XLA_FFI_DataType_S64, "numbers of types");
_Static_assert((int)XLA_EXECUTE == XLA_FFI_ExecutionStage_EXECUTE, "numbers of stages");
_Static_assert((int)XLA_INVALID_ARGUMENT == XLA_FFI_Error_Code_INVALID_ARGUMENT &&
                   (int)XLA_RESOURCE_EXHAUSTED == XLA_FFI_Error_Code_RESOURCE_EXHAUSTED &&
                   (int)XLA_UNIMPLEMENTED == XLA_FFI_Error_Code_UNIMPLEMENTED &&
                   (int)XLA_INTERNAL == XLA_FFI_Error_Code_INTERNAL &&
                   (int)XLA_UNAVAILABLE == XLA_FFI_Error_Code_UNAVAILABLE,
               "numbers of errors");
_Static_assert(XLA_FFI_API_MAJOR == XLA_MAJOR && XLA_FFI_API_MINOR >= XLA_MINOR, "the interface's version");
