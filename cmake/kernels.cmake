# Turns src/kernels.def into build steps: for every line a wrapper source that sets the line's parameters and includes
# the family's file, and for every CUDA line also a device image and an assembler file that embeds it.
#   ACR_KERNEL_SOURCES   what the library compiles
#   ACR_OP_SOURCES       the images of the operations beside attention
#   acromion_images      the target that makes the images
include(${CMAKE_CURRENT_LIST_DIR}/kernel_line.cmake)
set(kernels_def ${CMAKE_CURRENT_SOURCE_DIR}/src/kernels.def)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${kernels_def})
set(generated ${CMAKE_BINARY_DIR}/kernels)
set(compile_image ${CMAKE_CURRENT_SOURCE_DIR}/cmake/compile_image.sh)
file(MAKE_DIRECTORY ${generated} ${ACR_IMAGES})

# The CUDA toolkit: on PATH, at the usual place, or the one that `./run setup` puts into build/toolchain.
if(ACR_CUDA)
  find_program(ACR_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin
    ${CMAKE_CURRENT_SOURCE_DIR}/build/toolchain/bin)
  find_path(ACR_CUDA_INCLUDE cuda.h HINTS $ENV{CUDA_HOME}/include /usr/local/cuda/include
    ${CMAKE_CURRENT_SOURCE_DIR}/build/toolchain/include)
  if(NOT ACR_CUDA_INCLUDE)
    message(FATAL_ERROR "cuda.h not found: install the CUDA 13 toolkit, run ./run setup, or build for the CPU alone: "
      "-DACR_CUDA=OFF")
  endif()
else()
  set(ACR_NVCC "")
  set(ACR_CUDA_INCLUDE "")
endif()

set(isa_flags_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c)
set(isa_flags_avx512bf16 ${isa_flags_avx512} -mavx512bf16)
set(isa_flags_avx2 -mavx2 -mfma -mf16c)
set(isa_flags_portable "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(cpu_archs portable avx2 avx512 avx512bf16)
else()
  set(cpu_archs portable)
endif()

# Packs images for embedding (src/core/packed_image.h); the library unpacks them.
if(ACR_CUDA)
  find_path(ACR_ZSTD_INCLUDE zstd.h)
  find_library(ACR_ZSTD_LIBRARY NAMES libzstd.a zstd) # linked statically where it can be: see docs/decisions/003
  if(NOT ACR_ZSTD_INCLUDE OR NOT ACR_ZSTD_LIBRARY)
    message(FATAL_ERROR "zstd not found: install it (Debian: libzstd-dev), run ./run setup, or build for the CPU "
      "alone: -DACR_CUDA=OFF")
  endif()
  add_executable(acromion_pack_image EXCLUDE_FROM_ALL cmake/pack_image.c)
  target_include_directories(acromion_pack_image PRIVATE src/core ${ACR_ZSTD_INCLUDE})
  target_link_libraries(acromion_pack_image PRIVATE ${ACR_ZSTD_LIBRARY})
endif()

# acr_device_image(NAME SOURCE ARCH SPILLS [-DNAME=VALUE...]): makes ${ACR_IMAGES}/NAME.bin, the device image of SOURCE
# with KERNEL_NAME=NAME (compile_image.sh explains ARCH and SPILLS; the PTX that it leaves beside the image is for the
# PTX machine of the tests), packs it beside itself (as what differs from that of fp16, where NAME is its bf16 twin and
# the list has the fp16 line before it), and makes ${generated}/NAME.image.S, which embeds it as acr__image_NAME to
# acr__image_end_NAME. For targets of the folder that calls it.
function(acr_device_image name source arch spills)
  set(image ${ACR_IMAGES}/${name}.bin)
  set(packed ${ACR_IMAGES}/${name}.packed)
  set(portable ${ACR_PORTABLE_ARCHS})
  if(portable AND name MATCHES "^fwd_ladder") # never planned: where there is no machine code, the driver compiles PTX
    set(portable 80)
  endif()
  if(ACR_IMAGES STREQUAL "${CMAKE_BINARY_DIR}/images")
    if(NOT ACR_NVCC)
      message(FATAL_ERROR "nvcc not found: install the CUDA 13 toolkit, run ./run setup, or build for the CPU alone: "
        "-DACR_CUDA=OFF")
    endif()
    add_custom_command(OUTPUT ${image}
      COMMAND ${CMAKE_COMMAND} -E env KEEP_PTX=1
        ${compile_image} ${ACR_NVCC} ${image} ${arch} "${portable}" "${spills}"
        ${PROJECT_SOURCE_DIR}/${source} -I${PROJECT_SOURCE_DIR}/src -I${PROJECT_SOURCE_DIR}/src/core
        -I${ACR_CUDA_INCLUDE}
        ${ARGN} -DKERNEL_NAME=${name}
      DEPENDS ${PROJECT_SOURCE_DIR}/${source} ${compile_image}
      DEPFILE ${image}.d
      COMMENT "image ${name}" VERBATIM)
  elseif(NOT EXISTS ${image})
    message(FATAL_ERROR "ACR_IMAGES=${ACR_IMAGES} lacks ${name}.bin: build there first")
  endif()
  set(base "")
  string(REPLACE _bf16_ _f16_ twin ${name})
  get_property(names GLOBAL PROPERTY acr_image_names)
  set_property(GLOBAL APPEND PROPERTY acr_image_names ${name})
  if(source MATCHES "^src/" AND NOT twin STREQUAL name AND twin IN_LIST names)
    set(base ${ACR_IMAGES}/${twin}.bin)
    set(packed ${ACR_IMAGES}/${name}.twin.packed)
  endif()
  add_custom_command(OUTPUT ${packed} # not anew because another build has a packer of its own
    COMMAND acromion_pack_image ${packed} ${image} ${base}
    DEPENDS ${image} ${base} ${PROJECT_SOURCE_DIR}/cmake/pack_image.c ${PROJECT_SOURCE_DIR}/src/core/packed_image.h
    COMMENT "" VERBATIM)
  file(CONFIGURE OUTPUT ${generated}/${name}.image.S CONTENT
"/* Generated: embeds the device image of ${name}. */
    .section .rodata
    .balign 64
    .global acr__image_${name}
    .hidden acr__image_${name}
acr__image_${name}:
    .incbin \"${packed}\"
    .global acr__image_end_${name}
    .hidden acr__image_end_${name}
acr__image_end_${name}:
    .section .note.GNU-stack,\"\",%progbits
")
  set_source_files_properties(${generated}/${name}.image.S PROPERTIES OBJECT_DEPENDS ${packed})
endfunction()

# acr_own_files(OUT SOURCE): SOURCE and every file of ours that it includes, however indirectly.
function(acr_own_files out source)
  set(found ${source})
  set(open ${source})
  while(open)
    list(POP_FRONT open file)
    file(STRINGS ${CMAKE_CURRENT_SOURCE_DIR}/${file} includes REGEX "^[ \t]*#[ \t]*include[ \t]*\"")
    get_filename_component(folder ${file} DIRECTORY)
    foreach(line IN LISTS includes)
      string(REGEX REPLACE "^[^\"]*\"([^\"]*)\".*$" "\\1" name "${line}")
      foreach(place ${folder} src src/core include)
        if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${place}/${name})
          if(NOT ${place}/${name} IN_LIST found)
            list(APPEND found ${place}/${name})
            list(APPEND open ${place}/${name})
          endif()
          break()
        endif()
      endforeach()
    endforeach()
  endwhile()
  set(${out} ${found} PARENT_SCOPE)
endfunction()

# Of the line that acr_read_kernel_line read, in its caller's scope. acr_start_wrapper begins the text of its wrapper,
# and sets device_defines and spills; acr_add_image makes the device image of a CUDA line, and names it in the wrapper;
# acr_write_wrapper writes ${generated}/NAME.c, to be compiled with FLAGS.
macro(acr_start_wrapper)
  set(wrapper "/* Generated from src/kernels.def. */\n")
  set(device_defines "")
  set(spills "")
  foreach(parameter IN LISTS parameters)
    if(parameter MATCHES "^SPILLS_OK")
      set(spills ${parameter})
      continue()
    endif()
    string(REGEX REPLACE "=" " " define ${parameter})
    string(APPEND wrapper "#define ${define}\n")
    list(APPEND device_defines -D${parameter})
  endforeach()
  string(APPEND wrapper
    "#define KERNEL_NAME ${name}\n#define KERNEL_TEXT \"${name}\"\n#define KERNEL_ARCH \"${arch}\"\n"
    "#define KERNEL_ARCH_${arch} 1\n#define KERNEL_DESCRIPTION acr__kernel_${name}\n#include \"kernel.h\"\n"
    "extern const acr__kernel acr__kernel_${name};\n")
endmacro()

macro(acr_add_image)
  string(APPEND wrapper "extern const unsigned char acr__image_${name}[], acr__image_end_${name}[];\n"
    "#define KERNEL_IMAGE acr__image_${name}\n#define KERNEL_IMAGE_END acr__image_end_${name}\n")
  acr_device_image(${name} ${source} ${arch} "${spills}" ${device_defines})
endmacro()

macro(acr_write_wrapper flags)
  string(APPEND wrapper "#include \"${source}\"\n")
  string(REPLACE "\"src/" "\"" wrapper "${wrapper}")
  file(CONFIGURE OUTPUT ${generated}/${name}.c CONTENT "${wrapper}" @ONLY)
  set_source_files_properties(${generated}/${name}.c PROPERTIES COMPILE_OPTIONS "${flags}"
    OBJECT_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${source})
endmacro()

# acr_is_looked_into(OUT KERNEL): whether a sanitizer looks into a CPU kernel. It need not where it looks into another
# that differs in nothing that it sees: lanes share work in the same way whatever the type and the instruction set; fp16
# and e4m3 differ from bf16 in their loads and stores alone. gcc takes 15 s for each.
function(acr_is_looked_into out kernel)
  set(${out} TRUE PARENT_SCOPE)
  if((ACR_SANITIZE MATCHES thread AND NOT kernel MATCHES "_f32_.*_avx2$") OR
     (ACR_SANITIZE MATCHES address AND kernel MATCHES "_(f16|e4m3)_" AND NOT kernel MATCHES "_avx2$"))
    set(${out} FALSE PARENT_SCOPE)
  endif()
endfunction()

# ACR_KERNELS as a regular expression: patterns of names, separated by commas, * for any characters.
string(REPLACE "*" "[a-z0-9_]*" chosen "${ACR_KERNELS}")
string(REPLACE "," "|" chosen "${chosen}")

set(ACR_KERNEL_SOURCES "")
set(acr_kernel_names "")
set(images "")
file(STRINGS ${kernels_def} lines REGEX "^KERNEL\\(")
set(listed "/* Generated from src/kernels.def: the lines that this build has. */\n")
foreach(line IN LISTS lines)
  acr_read_kernel_line("${line}") # name, family, arch, parameters, source
  if(arch MATCHES "^(portable|avx2|avx512|avx512bf16)$" AND NOT arch IN_LIST cpu_archs)
    continue() # another processor's instruction set
  endif()
  if(NOT ACR_CUDA AND NOT arch MATCHES "^(portable|avx2|avx512|avx512bf16)$")
    continue()
  endif()
  if(chosen AND NOT name MATCHES "^(${chosen})$")
    continue()
  endif()
  string(APPEND listed "${line}\n")

  acr_start_wrapper()
  if(source MATCHES "\\.cu$")
    acr_add_image()
    list(APPEND images ${ACR_IMAGES}/${name}.bin)
    list(APPEND ACR_KERNEL_SOURCES ${generated}/${name}.image.S)
    set(flags "")
  else()
    acr_is_looked_into(looked_into ${name})
    if(NOT ACR_SANITIZE)
      set(optimize -O3)
    elseif(looked_into)
      set(optimize "")
    else()
      set(optimize -fno-sanitize=all)
    endif()
    set(flags ${isa_flags_${arch}} ${optimize} -ffp-contract=fast -fno-math-errno)
    # A CPU kernel's machine code cannot be named at run time; what it is made from can: its file and all that it
    # includes of ours, since a shared header is code, too.
    acr_own_files(own ${source})
    set(source_digest "")
    foreach(file IN LISTS own)
      set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${file})
      file(SHA256 ${CMAKE_CURRENT_SOURCE_DIR}/${file} file_digest)
      string(APPEND source_digest ${file_digest})
    endforeach()
    string(SHA256 source_digest "${source_digest}")
    string(APPEND wrapper "static const unsigned char kernel_build[] = \"${source_digest} ${flags} ${parameters}\"\n"
      "    \" ${CMAKE_C_COMPILER_ID} ${CMAKE_C_COMPILER_VERSION} ${CMAKE_C_FLAGS}\";\n"
      "#define KERNEL_IMAGE kernel_build\n#define KERNEL_IMAGE_END (kernel_build + sizeof kernel_build)\n")
  endif()
  acr_write_wrapper("${flags}")
  list(APPEND ACR_KERNEL_SOURCES ${generated}/${name}.c)
endforeach()
file(CONFIGURE OUTPUT ${generated}/kernels_built.def CONTENT "${listed}" @ONLY)
set_source_files_properties(src/core/registry.c PROPERTIES COMPILE_OPTIONS "-I${generated}")

# tests/device/unlisted.def: lines that wait for a GPU. Tests have them, the library has not:
# ${generated}/unlisted/kernels_built.def is the table of both.
set(ACR_UNLISTED_SOURCES "")
if(ACR_CUDA AND ACR_TESTS)
  set(unlisted_def ${CMAKE_CURRENT_SOURCE_DIR}/tests/device/unlisted.def)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${unlisted_def})
  file(STRINGS ${unlisted_def} lines REGEX "^KERNEL\\(")
  foreach(line IN LISTS lines)
    acr_read_kernel_line("${line}")
    if(chosen AND NOT name MATCHES "^(${chosen})$")
      continue()
    endif()
    string(APPEND listed "${line}\n")
    acr_start_wrapper()
    acr_add_image()
    acr_write_wrapper("")
    list(APPEND images ${ACR_IMAGES}/${name}.bin)
    list(APPEND ACR_UNLISTED_SOURCES ${generated}/${name}.c ${generated}/${name}.image.S)
  endforeach()
endif()
file(CONFIGURE OUTPUT ${generated}/unlisted/kernels_built.def CONTENT "${listed}" @ONLY)

# src/cuda/ops/ops.def: an image a line. They are no kernels that somebody chooses among: every build has them.
set(ACR_OP_SOURCES "")
set(ops_def ${CMAKE_CURRENT_SOURCE_DIR}/src/cuda/ops/ops.def)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${ops_def})
if(ACR_CUDA)
  file(STRINGS ${ops_def} lines REGEX "^OP\\(")
  foreach(line IN LISTS lines)
    if(NOT line MATCHES "^OP\\(([a-z0-9_]+), *[A-Z_]+, *([a-z]+), *(ACR_[A-Z0-9]+), *([0-9]+)\\)$")
      message(FATAL_ERROR "src/cuda/ops/ops.def: not OP(name, operation, file, type, parts): ${line}")
    endif()
    set(name ${CMAKE_MATCH_1})
    acr_device_image(${name} src/cuda/ops/${CMAKE_MATCH_2}.cu 80 "" -DDTYPE=${CMAKE_MATCH_3} -DPARTS=${CMAKE_MATCH_4})
    list(APPEND images ${ACR_IMAGES}/${name}.bin)
    list(APPEND ACR_OP_SOURCES ${generated}/${name}.image.S)
  endforeach()
endif()
add_custom_target(acromion_images DEPENDS ${images})
